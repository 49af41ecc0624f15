"""Attention in plain PyTorch: the reference, and what runs on the CPU.

Shape letters: T query rows, R requests, Q rows of a request, H query heads, G key/value heads,
D head size, N blocks of the pool, B block size, W width of a block table, L visible keys.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.attention import paged_attention_reference
from specdec.verifier.attention.base import AttentionMetadata, AttentionNeeds
from specdec.verifier.modes import AttentionCGSupport, BatchDescriptor

# Up to this many float32 scores, products with all of them in memory are the fastest way. In lower
# precision PyTorch would round the scores between the products.
_MAX_SCORES = 1 << 22


def attend_request(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    context_len: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Attention of one request's rows, of which row ``j`` sees ``keys[: context_len + j + 1]``.

    query [Q, H, D], keys and values [L, G, D] with 0 < L <= context_len + Q -> [Q, H, D]. Query
    heads of one key/value head are folded into rows, so that nothing is repeated. A row that sees
    a key or value that is not finite becomes NaN; other rows are as if it were not there.
    """
    num_rows, num_heads, head_size = query.shape
    num_keys, num_kv_heads, _ = keys.shape
    few = num_heads * num_rows * num_keys <= _MAX_SCORES
    if soft_cap is not None and not few and num_rows > 1:
        half = num_rows // 2
        split = context_len + half
        options = (scale, sliding_window, soft_cap)
        first = attend_request(query[:half], keys[:split], values[:split], context_len, *options)
        return torch.cat([first, attend_request(query[half:], keys, values, split, *options)])
    group = num_heads // num_kv_heads
    folded = query.view(num_rows, num_kv_heads, group, head_size).transpose(0, 1)
    folded = folded.reshape(num_kv_heads, num_rows * group, head_size)  # [G, Q * group, D]
    keys, values = keys.transpose(0, 1), values.transpose(0, 1)  # [G, L, D]

    hidden = broken = blind = None
    # What some row may not see is only in this tail, or anywhere where a window is shorter.
    tail = slice(context_len + 1, None)
    slides = sliding_window is not None and context_len + num_rows > sliding_window
    if num_keys > context_len + 1 or slides:
        device = query.device
        positions = torch.arange(num_keys, device=device)
        last = torch.arange(context_len, context_len + num_rows, device=device)
        last = last.repeat_interleave(group)[:, None]
        hidden = positions > last  # [Q * group, L]
        if slides:
            assert sliding_window is not None
            tail = slice(0, None)
            hidden |= positions <= last - sliding_window
            # Only the rows past the last key can have all of them before their window.
            if context_len + num_rows - num_keys >= sliding_window:
                blind = hidden.all(-1)
                hidden &= ~blind[:, None]
        # A weight of zero does not silence NaN.
        sound = (keys[:, tail].isfinite() & values[:, tail].isfinite()).all(-1)  # [G, tail]
        if not sound.all():
            broken = (~sound[:, None] & ~hidden[None, :, tail]).any(-1)  # [G, Q * group]
            keys = keys.masked_fill(_past(~sound, num_keys), 0)
            values = values.masked_fill(_past(~sound, num_keys), 0)

    if soft_cap is not None or (query.dtype == torch.float32 and few):
        scores = torch.bmm(folded.float() * scale, keys.transpose(1, 2).float())
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        out = torch.bmm(torch.softmax(scores, dim=-1), values.float()).to(query.dtype)
    else:
        mask = None if hidden is None else ~hidden[None]
        out = F.scaled_dot_product_attention(
            folded[None], keys[None], values[None], attn_mask=mask, scale=scale
        )[0]
    if broken is not None:
        out = out.masked_fill(broken[..., None], torch.nan)
    if blind is not None:
        out = out.masked_fill(blind[:, None], 0)
    out = out.view(num_kv_heads, num_rows, group, head_size).transpose(0, 1)
    return out.reshape(num_rows, num_heads, head_size)


def _past(mask: Tensor, num_keys: int) -> Tensor:
    """``mask`` [G, n] of the last keys, as [G, num_keys, 1] of all of them."""
    return F.pad(mask, (num_keys - mask.shape[1], 0))[..., None]


def attend_requests(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    context_lens: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Attention request by request, each over its own pages only. Reads lengths on the host."""
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    block_size = key_cache.shape[1]
    starts = query_start_loc.tolist()
    for request, (context_len, seq_len) in enumerate(
        zip(context_lens.tolist(), seq_lens.tolist(), strict=True)
    ):
        start, end = starts[request], starts[request + 1]
        # Rows that stand before the text see nothing and keep their zeros.
        first = start + max(0, -context_len)
        num_keys = min(context_len + end - start, seq_len)
        if first >= end or num_keys <= 0:
            continue
        context_len = max(0, context_len)
        first_page = 0
        if sliding_window is not None:
            # Pages before the first row's window are not read.
            first_page = min(max(0, context_len - sliding_window + 1), num_keys - 1) // block_size
        pages = block_table[request, first_page : -(-num_keys // block_size)]
        skipped = first_page * block_size
        keys = key_cache.index_select(0, pages).flatten(0, 1)[: num_keys - skipped]
        values = value_cache.index_select(0, pages).flatten(0, 1)[: num_keys - skipped]
        out[first:end] = attend_request(
            query[first:end], keys, values, context_len - skipped, scale, sliding_window, soft_cap
        )
    return out


# One opaque operator, so that a recorded graph holds one call whose body reads the lengths of the
# step at hand.
_library = torch.library.Library("specdec", "FRAGMENT")
_library.define(
    "paged_attention_cpu(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, "
    "Tensor query_start_loc, Tensor context_lens, Tensor seq_lens, float scale, "
    "int? sliding_window=None, float? soft_cap=None) -> Tensor"
)
_library.impl("paged_attention_cpu", attend_requests, "CPU")
_library.impl("paged_attention_cpu", lambda query, *_: torch.empty_like(query), "Meta")


class SdpaBackend:
    """Any head size, dtype and block size. On a GPU only uniform batches can be captured."""

    name = "sdpa"
    batch_invariant = False

    def __init__(self, device: torch.device | str) -> None:
        on_cpu = torch.device(device).type == "cpu"
        self.cg_support = AttentionCGSupport.ALWAYS if on_cpu else AttentionCGSupport.UNIFORM_BATCH

    def unsupported(self, needs: AttentionNeeds) -> str | None:
        if needs.latent_size is not None:
            return "latent attention; that is what 'mla' is for"
        return None

    def forbids_full(self, batch: BatchDescriptor) -> str | None:
        return None

    def forward(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        tensors = (
            query,
            key_cache,
            value_cache,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.context_lens,
            metadata.seq_lens,
        )
        options = (sliding_window, soft_cap)
        if query.device.type == "cpu":
            return torch.ops.specdec.paged_attention_cpu(*tensors, scale, *options)
        if not metadata.uniform:
            return attend_requests(*tensors, scale, *options)
        return paged_attention_reference(*tensors, metadata.max_query_len, scale, True, *options)
