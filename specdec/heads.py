"""Draft heads by name: "eagle:PATH", "medusa:PATH" and "mtp", checked first and loaded later."""

import torch

from specdec.drafters.base import Drafter
from specdec.drafters.eagle import EagleDrafter
from specdec.drafters.eagle_checkpoint import EagleCheckpoint, load_eagle, open_eagle
from specdec.drafters.medusa import MedusaCheckpoint, load_medusa, open_medusa
from specdec.drafters.mtp import MtpCheckpoint, load_mtp, open_mtp
from specdec.verifier.attention.base import AttentionBackend
from specdec.verifier.models.config import ModelConfig
from specdec.verifier.models.llama import CausalLM

HeadCheckpoint = EagleCheckpoint | MedusaCheckpoint | MtpCheckpoint


def open_head(
    draft: str, target: ModelConfig, target_model: object
) -> tuple[HeadCheckpoint, ModelConfig] | None:
    """A head's files, found to fit the target, and the shape of its attention; None: not a head.

    ``target_model``: what the target is loaded from. Raises FileNotFoundError naming ``draft``, or
    ValueError naming the file and the field or tensor.
    """
    try:
        return _open(draft, target, target_model)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"draft {draft!r}: {error}") from error


def _open(
    draft: str, target: ModelConfig, target_model: object
) -> tuple[HeadCheckpoint, ModelConfig] | None:
    kind, _, path = draft.partition(":")
    if kind == "eagle":
        head = open_eagle(path, target)
        return head, head.config.layer
    if kind == "medusa":
        # It has no attention of its own: the target's stands for it.
        return open_medusa(path, target), target
    if draft == "mtp":
        return open_mtp(target_model, target), target
    return None


def load_head(
    checkpoint: HeadCheckpoint, target: CausalLM, backend: AttentionBackend, vocab_size: int
) -> Drafter:
    """The drafter beside its target."""
    if isinstance(checkpoint, MedusaCheckpoint):
        return load_medusa(checkpoint, target, vocab_size=vocab_size)
    if isinstance(checkpoint, MtpCheckpoint):
        module = load_mtp(checkpoint, target, backend)
        every_id = torch.arange(target.config.vocab_size, device=target.device)
        drafter = EagleDrafter(module, every_id, vocab_size=vocab_size)
        drafter.name = "mtp"
        return drafter
    head, target_ids = load_eagle(checkpoint, target, backend)
    return EagleDrafter(head, target_ids, vocab_size=vocab_size)
