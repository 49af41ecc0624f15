"""Medusa heads: each predicts the token at one distance from the target's last hidden state alone.

Head j reads the final hidden state at the last token that the target has read and predicts the
token j + 2 places after it; the target's own head predicts the one between, which is committed by
then. Source: Cai et al., "Medusa", 2024 (the heads of Medusa-1; one candidate per head, no tree).

Shape letters: R requests of the batch, T tokens, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional as F

from specdec.drafters.base import Draft, Drafter
from specdec.kernels.linear import linear, linear_argmax
from specdec.kernels.norm import rms_norm
from specdec.verifier.feature_cache import FeatureCache
from specdec.verifier.hub import resolve_model
from specdec.verifier.models.config import ModelConfig, UnsupportedModelError, read_json_object
from specdec.verifier.models.llama import CausalLM
from specdec.verifier.passes import draft_pass
from specdec.verifier.sampling import draft_tokens
from specdec.verifier.state import DecodeState, RowState

WEIGHTS, PICKLED = "medusa_lm_head.safetensors", "medusa_lm_head.pt"


@dataclass(frozen=True, kw_only=True, slots=True)
class MedusaCheckpoint:
    """Heads found to fit their target."""

    path: Path  # of the tensors
    num_heads: int
    num_layers: int  # residual blocks before each head's output

    def read(self) -> Mapping[str, Tensor]:
        with safe_open(self.path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def open_medusa(path_or_id: str | Path, target: ModelConfig) -> MedusaCheckpoint:
    """Check the folder or hub id of Medusa heads against the configuration of their target.

    Raises FileNotFoundError, or ValueError naming the file and the field or tensor that is missing,
    unexpected or of another shape.
    """
    if target.family.is_gemma:
        raise ValueError("draft='medusa:PATH': heads of Gemma's models are not supported")
    if not str(path_or_id):
        raise ValueError("draft='medusa:' names no heads: write medusa:PATH")
    folder = resolve_model(path_or_id, weights=True)
    source = folder / "config.json"
    if not source.is_file():
        raise FileNotFoundError(f"Medusa heads {str(path_or_id)!r} have no config.json")
    config = read_json_object(source)
    num_heads, num_layers = (
        _count(config, name, source) for name in ("medusa_num_heads", "medusa_num_layers")
    )
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = config.get(name), getattr(target, name)
        if ours is not None and ours != theirs:
            raise ValueError(f"{source}: {name} is {ours!r}, and the target's is {theirs}")
    path = folder / WEIGHTS
    if not path.is_file():
        if (folder / PICKLED).is_file():
            raise UnsupportedModelError(
                f"{folder / PICKLED} is pickled, which is never loaded; convert it to {WEIGHTS}"
            )
        raise FileNotFoundError(f"weights not found: {path}")
    _check_shapes(path, num_heads, num_layers, target)
    return MedusaCheckpoint(path=path, num_heads=num_heads, num_layers=num_layers)


def load_medusa(
    checkpoint: MedusaCheckpoint, target: CausalLM, *, vocab_size: int
) -> "MedusaDrafter":
    """The heads beside their target, in its dtype."""
    tensors = {
        name: tensor.to(target.device, target.dtype) for name, tensor in checkpoint.read().items()
    }
    layers = range(checkpoint.num_layers)
    heads = [
        MedusaHead(
            blocks=tuple(
                (tensors[f"{head}.{layer}.linear.weight"], tensors[f"{head}.{layer}.linear.bias"])
                for layer in layers
            ),
            output=tensors[f"{head}.{checkpoint.num_layers}.weight"],
        )
        for head in range(checkpoint.num_heads)
    ]
    return MedusaDrafter(heads, target, vocab_size=vocab_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class MedusaHead:
    """Residual blocks and an output layer."""

    blocks: tuple[tuple[Tensor, Tensor], ...]  # weight [hidden, hidden] and bias [hidden] of each
    output: Tensor  # [V, hidden]

    def hidden(self, x: Tensor) -> Tensor:
        """x [R, hidden] -> what the output layer reads, [R, hidden]."""
        for weight, bias in self.blocks:
            x = x + F.silu(linear(x, weight, bias))
        return x


class MedusaDrafter(Drafter):
    """Runs the heads on the final hidden state of each row's last token but one.

    Those states lie in pages that mirror the target's block ids, written whenever the target reads
    a token, so nothing ever has to catch up. Rows with an adapter are drafted by the same heads,
    from their own hidden states. At most as many tokens as there are heads are drafted.
    """

    name = "medusa"
    capturable = True

    def __init__(self, heads: list[MedusaHead], target: CausalLM, *, vocab_size: int) -> None:
        """``vocab_size``: ids of the target that may be emitted; higher ones are never drafted."""
        self.heads = heads
        self.vocab_size = vocab_size
        self.feature_layers = (target.config.num_layers,)
        self._norm, self._eps = target.norm, target.config.rms_norm_eps
        self._hidden_size, self._dtype = target.config.hidden_size, target.dtype
        self.features: FeatureCache | None = None

    def bytes_per_block(self, block_size: int) -> int:
        return block_size * self._hidden_size * self._dtype.itemsize

    def attach(self, state: DecodeState, num_blocks: int, draft_width: int) -> None:
        self.features = FeatureCache(
            num_blocks=num_blocks,
            block_size=state.block_size,
            num_features=self._hidden_size,
            dtype=self._dtype,
            device=state.device,
        )

    def keep_features(self, features: Tensor, slot_mapping: Tensor) -> None:
        assert self.features is not None
        # The target's stream before its final norm: heads read it after.
        self.features.write(rms_norm(features.contiguous(), self._norm, self._eps), slot_mapping)

    def propose(self, state: RowState, k: int) -> Draft:
        assert self.features is not None
        # Only the place of the token is wanted: the newest but one has been read by the target.
        fed = draft_pass(
            state,
            None,
            1,
            offset=-2,
            min_drafts=1,
            needs_kv=False,
            vocab_size=self.vocab_size,
            max_len=state.state.max_model_len,
        )
        hidden = self.features.read(fed.metadata.slot_mapping)
        drafted = [
            self._sample(state, head, hidden, step) for step, head in enumerate(self.heads[:k])
        ]
        missing = k - len(drafted)
        ids = torch.stack([ids for ids, _ in drafted], dim=1)
        probs = [each for _, each in drafted if each is not None]
        return Draft(
            F.pad(ids, (0, missing), value=-1),
            F.pad(torch.stack(probs, dim=1), (0, 0, 0, missing)) if probs else None,
        )

    def propose_after(self, state: RowState, k: int, given: Tensor) -> Draft:
        # A head looks at none of the drafts before its own.
        return self.propose(state, k)

    def _sample(
        self, state: RowState, head: MedusaHead, hidden: Tensor, offset: int
    ) -> tuple[Tensor, Tensor | None]:
        """A token [R] int64 for the output ``offset`` places after the next; its distribution."""
        x = head.hidden(hidden)
        if state.sampling is None:
            return linear_argmax(x, head.output, self.vocab_size)[0], None
        logits = linear(x, head.output, out_dtype=torch.float32)
        return draft_tokens(logits[:, : self.vocab_size], state.sampling.at(offset))


def _count(config: Mapping[str, object], name: str, source: Path) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{source}: {name} must be an integer of at least 1, got {value!r}")
    return value


def _check_shapes(path: Path, num_heads: int, num_layers: int, target: ModelConfig) -> None:
    size = target.hidden_size
    expected: dict[str, list[int]] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            expected[f"{head}.{layer}.linear.weight"] = [size, size]
            expected[f"{head}.{layer}.linear.bias"] = [size]
        expected[f"{head}.{num_layers}.weight"] = [target.vocab_size, size]
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            shapes = {
                name: list(file.get_slice(name).get_shape())
                for name in file.keys()  # noqa: SIM118
            }
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut short: {error}") from error
    for name, shape in expected.items():
        if name not in shapes:
            raise ValueError(f"{path} lacks the tensor {name}")
        if shapes[name] != shape:
            raise ValueError(
                f"{path}: {name} has the shape {shapes[name]}, and the target asks for {shape}"
            )
    unexpected = sorted(set(shapes) - set(expected))
    if unexpected:
        raise ValueError(
            f"{path} has a tensor that {num_heads} heads of {num_layers} blocks have no use for: "
            f"{unexpected[0]}"
        )
