"""Reads an EAGLE-3 head: what does not fit the target is refused before any weights load."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specdec.drafters.eagle_config import EagleConfig, read_eagle_config
from specdec.drafters.eagle_head import EagleHead
from specdec.verifier.attention.base import AttentionBackend
from specdec.verifier.checkpoint import SafetensorsCheckpoint
from specdec.verifier.hub import resolve_model
from specdec.verifier.models.config import ModelConfig
from specdec.verifier.models.llama import CausalLM

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
# Draft id -> what to add for the target's id; target id -> whether the draft has it.
TO_TARGET, IN_DRAFT = "d2t", "t2d"
# Names in one message.
MAX_NAMES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleCheckpoint:
    """A head's files, found to fit each other and the target."""

    config: EagleConfig
    tensors: SafetensorsCheckpoint
    names: Mapping[str, str]  # SafeAILab's name of each tensor -> the file's
    target_ids: Tensor  # [draft vocab] int64: the target's id of each draft id, all different

    def read(self, name: str) -> Tensor:
        return self.tensors.read(self.names[name])


def open_eagle(path_or_id: str | Path, target: ModelConfig) -> EagleCheckpoint:
    """Check a head's folder or hub id against the configuration of its target.

    Raises FileNotFoundError, or ValueError naming the file and the field or tensor that is missing,
    unexpected, of another shape or out of range.
    """
    if not str(path_or_id):
        raise ValueError("draft='eagle:' names no head: write eagle:PATH")
    folder = _folder(path_or_id, weights=False)
    config = read_eagle_config(folder, target)
    tensors = SafetensorsCheckpoint(
        _folder(path_or_id, weights=True), indices=(TO_TARGET, IN_DRAFT)
    )
    names = {_common_name(name): name for name in tensors.shapes()}
    source = tensors.source
    twice = [name for name in tensors.shapes() if name not in names.values()]
    if twice:
        raise ValueError(f"{source} has two tensors for {_common_name(twice[0])}")
    shapes = {ours: tensors.shapes()[theirs] for ours, theirs in names.items()}
    _check_shapes(config, shapes, source)
    target_ids = torch.arange(config.draft_vocab_size)
    if TO_TARGET in shapes:
        target_ids += tensors.read(TO_TARGET).long()
    _check_map(target_ids, config.layer.vocab_size, source)
    if IN_DRAFT in shapes:
        found = tensors.read(IN_DRAFT).bool().nonzero()[:, 0]
        if not torch.equal(found, target_ids.sort().values):
            raise ValueError(f"{source}: {IN_DRAFT} and {TO_TARGET} name different tokens")
    return EagleCheckpoint(config=config, tensors=tensors, names=names, target_ids=target_ids)


def load_eagle(
    checkpoint: EagleCheckpoint, target: CausalLM, attention_backend: AttentionBackend
) -> tuple[EagleHead, Tensor]:
    """The head beside its target, in the target's dtype, and the target's ids of its draft ids.

    Those are increasing, so that the lowest of several ids is the same in both vocabularies.
    Raises ValueError naming a tensor that the target's dtype cannot hold.
    """
    config = checkpoint.config
    target_ids, order = checkpoint.target_ids.sort()
    embedding: Tensor | None = None
    lm_head: Tensor | None = None
    if EMBEDDING not in checkpoint.names:
        embedding = target.whole_vocabulary(target.embed_tokens)
    if HEAD not in checkpoint.names:
        lm_head = target.whole_vocabulary(target.lm_head)
        if config.draft_vocab_size < config.layer.vocab_size:
            lm_head = lm_head[target_ids.to(target.device)]
    head = EagleHead(
        config,
        dtype=target.dtype,
        device=target.device,
        attention_backend=attention_backend,
        embed_tokens=embedding,
        lm_head=lm_head,
    )
    for name, slot in head.weight_slots().items():
        tensor = checkpoint.read(name)
        slot.copy_(tensor[order] if name == HEAD else tensor)
        if not slot.isfinite().all():
            raise ValueError(
                f"{checkpoint.tensors.source}: {name} has values that {head.dtype}, the target's "
                "dtype, does not hold"
            )
    return head.eval(), target_ids.to(target.device)


def _folder(path_or_id: str | Path, *, weights: bool) -> Path:
    path = resolve_model(path_or_id, weights=weights)
    if not path.is_dir():
        raise ValueError(f"EAGLE head {str(path_or_id)!r} is not a folder")
    return path


def _common_name(name: str) -> str:
    """SafeAILab's name of a tensor that speculators and vLLM call after the layer's number."""
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def _check_shapes(config: EagleConfig, shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    backend: AttentionBackend = None  # type: ignore[assignment]
    whole = EagleHead(config, dtype=torch.float32, device="meta", attention_backend=backend)
    expected = {name: tuple(slot.shape) for name, slot in whole.weight_slots().items()}
    draft_vocab, vocab = config.draft_vocab_size, config.layer.vocab_size
    optional: dict[str, tuple[int, ...]] = {TO_TARGET: (draft_vocab,), IN_DRAFT: (vocab,)}
    if config.layer.hidden_size == config.target_hidden_size:
        # The target's own stand in for them.
        optional |= {name: expected.pop(name) for name in (EMBEDDING, HEAD)}
    if draft_vocab < vocab:
        expected[TO_TARGET] = optional.pop(TO_TARGET)
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise ValueError(f"{source} lacks the tensor {_listed(missing)}")
    expected |= optional
    unexpected = [name for name in shapes if name not in expected]
    if unexpected:
        raise ValueError(
            f"{source} has a tensor that an EAGLE-3 head of this configuration has no use for: "
            f"{_listed(unexpected)}"
        )
    for name, shape in shapes.items():
        if shape != expected[name]:
            raise ValueError(
                f"{source}: {name} has the shape {list(shape)}, and the configuration asks for "
                f"{list(expected[name])}"
            )


def _check_map(target_ids: Tensor, vocab_size: int, source: str) -> None:
    outside = (target_ids < 0) | (target_ids >= vocab_size)
    if outside.any():
        at = int(outside.long().argmax())
        raise ValueError(
            f"{source}: {TO_TARGET} maps draft id {at} to {int(target_ids[at])}, outside of the "
            f"target's {vocab_size} ids"
        )
    if target_ids.unique().numel() < target_ids.numel():
        raise ValueError(f"{source}: {TO_TARGET} maps two draft ids to one of the target's")


def _listed(names: list[str]) -> str:
    rest = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")
