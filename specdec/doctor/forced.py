"""Teacher forcing: one model over a finished text, from its first token, with nothing kept.

Shape letters: T tokens of the text, V vocabulary.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.verifier.attention.base import AttentionMetadata
from specdec.verifier.kv_cache import KVCache
from specdec.verifier.models.base import LanguageModel
from specdec.verifier.models.llama import CausalLM
from specdec.verifier.models.rope import RopeConfig, cos_sin_table

# Distances of the two best logits below which rounding may pick either token.
CLOSE_CALL = {torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.25}
BLOCK_SIZE = 16
# Texts are read in chunks of this many tokens, and logits made for as many rows at once.
CHUNK, HEAD_ROWS = 1024, 128


@dataclass(frozen=True, slots=True)
class Choices:
    """A model's greedy choice after each prefix of a text."""

    tokens: list[int]  # [T]: after the first i + 1 tokens
    margins: list[float]  # [T]: the best logit above the second; 0 where logits are not finite
    finite: bool  # all logits are


@torch.inference_mode()
def forced_choices(
    model: LanguageModel, ids: Sequence[int], vocab_size: int, *, num_layers: int | None = None
) -> Choices:
    """Run ``model`` over ``ids`` and take the argmax over the ids below ``vocab_size``.

    Ids that the model has no row for read as its last one, as a drafter reads them. With
    ``num_layers`` the model stops after that many.
    """
    hidden, _ = forced_pass(model, ids, num_layers=num_layers)
    tokens: list[int] = []
    margins: list[float] = []
    finite = True
    for rows in hidden.split(HEAD_ROWS):
        logits = model.compute_logits(rows)[:, :vocab_size]
        is_finite = logits.isfinite().all(dim=1)
        finite = finite and bool(is_finite.all())
        best = logits.topk(2).values
        margins += (best[:, 0] - best[:, 1]).where(is_finite, 0.0).tolist()
        # topk may put either of two equal logits first; argmax gives ties to the lowest id.
        tokens += logits.argmax(dim=1).tolist()
    return Choices(tokens, margins, finite)


@torch.inference_mode()
def forced_pass(
    model: LanguageModel, ids: Sequence[int], *, num_layers: int | None = None
) -> tuple[Tensor, KVCache]:
    """Hidden states [T, hidden], and the cache that holds position p at block p // BLOCK_SIZE."""
    device = model.device
    text = torch.tensor(ids, device=device).clamp_max(model.config.vocab_size - 1)
    num_blocks = -(-len(ids) // BLOCK_SIZE)
    cache = model.make_kv_cache(num_blocks, BLOCK_SIZE)
    table = torch.arange(num_blocks, dtype=torch.int32, device=device)[None]
    out = []
    for start in range(0, len(ids), CHUNK):
        end = min(start + CHUNK, len(ids))
        positions = torch.arange(start, end, device=device)
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, end - start], dtype=torch.int32, device=device),
            context_lens=torch.tensor([start], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([end], dtype=torch.int32, device=device),
            block_table=table,
            slot_mapping=positions,
            max_query_len=end - start,
            uniform=False,
            state_rows=torch.zeros(1, dtype=torch.int64, device=device),
        )
        given = model.forward(text[start:end], positions, cache, metadata, num_layers=num_layers)
        # A model that serves a head gives further states behind its own.
        out.append(given[:, : model.config.hidden_size].contiguous())
    return torch.cat(out), cache


def with_rope(model: CausalLM, rope: RopeConfig) -> CausalLM:
    """The same weights under another rotary embedding."""
    other = copy.copy(model)
    # A copied module shares its table of buffers.
    other._buffers = dict(model._buffers)
    other.cos_sin = cos_sin_table(rope, model.config.max_position_embeddings, model.device)
    return other
