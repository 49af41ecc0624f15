"""Attention by the flash-attn package (FlashAttention-2, arXiv:2307.08691) over our paged cache."""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.kernels.attention import paged_attention_reference
from specdec.verifier.attention.aligned import AlignedRows, align_rows
from specdec.verifier.attention.base import AttentionMetadata, AttentionNeeds
from specdec.verifier.modes import AttentionCGSupport, BatchDescriptor

PAGE_SIZE = 256  # its pages are multiples of this, and no block of ours is larger


class FlashAttnBackend:
    """Uniform batches by ``flash_attn_with_kvcache``, others by ``flash_attn_varlen_func``.

    How it splits keys depends on the batch, so a row's bits do too. Builds of the package differ in
    the head sizes, windows and soft caps that they hold: ``unsupported`` tries them out.
    """

    name = "flash_attn"
    cg_support = AttentionCGSupport.UNIFORM_BATCH
    batch_invariant = False

    def __init__(self) -> None:
        """Raises ImportError or OSError where the package does not load."""
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self._with_kvcache = flash_attn_with_kvcache
        self._varlen = flash_attn_varlen_func

    def unsupported(self, needs: AttentionNeeds) -> str | None:
        if needs.device.type != "cuda":
            return f"it runs on CUDA, not on {needs.device.type}"
        if needs.latent_size is not None:
            return "latent attention; that is what 'mla' is for"
        if needs.dtype not in (torch.bfloat16, torch.float16):
            return f"dtype {needs.dtype}; it has bfloat16 and float16"
        if not 8 <= needs.head_size <= 256 or needs.head_size % 8:
            return f"head size {needs.head_size}; it has multiples of 8 up to 256"
        if needs.block_size != PAGE_SIZE:
            return f"block size {needs.block_size}; its pages have {PAGE_SIZE} positions"
        window, cap = needs.sliding_window is not None, needs.soft_cap is not None
        return _missing_in_build(needs.head_size, needs.dtype, needs.device, window, cap)

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
        rows = align_rows(metadata)
        options = {
            "softmax_scale": scale,
            "causal": True,
            "window_size": (-1, -1) if sliding_window is None else (sliding_window - 1, 0),
            "softcap": soft_cap or 0.0,
            "block_table": metadata.block_table,
        }
        queries = rows.queries(query)
        if metadata.uniform:
            by_request = queries.unflatten(0, (-1, metadata.max_query_len))
            out = self._with_kvcache(
                by_request, key_cache, value_cache, cache_seqlens=rows.num_keys, **options
            ).flatten(0, 1)
        else:
            ends, table = _keys_of_requests(rows, metadata, key_cache.shape[1])
            out = self._varlen(
                queries,
                key_cache,
                value_cache,
                metadata.query_start_loc,
                ends,
                metadata.max_query_len,
                table.shape[1] * key_cache.shape[1],
                **(options | {"block_table": table}),
            )
        return rows.results(out)


def _keys_of_requests(
    rows: AlignedRows, metadata: AttentionMetadata, page_size: int
) -> tuple[Tensor, Tensor]:
    """Where each request's keys end, [R + 1] int32, and a block table that reaches so far.

    A tile of query rows that sees no key writes its sums where they would lie in a uniform batch,
    past the end of those of a flattened one (seen with 2.8.3). So requests of padding, which have
    rows and no keys, are given as many keys as rows; what they read is thrown away.
    """
    query_lens = metadata.query_start_loc.diff()
    num_keys = torch.where(rows.num_keys == 0, query_lens, rows.num_keys)
    missing = -(-metadata.max_query_len // page_size) - metadata.block_table.shape[1]
    table = F.pad(metadata.block_table, (0, max(0, missing)))
    return F.pad(num_keys.cumsum(0, dtype=torch.int32), (1, 0)), table


@cache
def _missing_in_build(
    head_size: int, dtype: torch.dtype, device: torch.device, window: bool, cap: bool
) -> str | None:
    """What the installed build refuses or gets wrong on a small batch, or None."""
    asked = f"head size {head_size}, {dtype}"
    asked += ", a sliding window" * window + ", a soft cap" * cap
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    num_reqs, query_len = 2, 3
    lens = torch.tensor([10, 290], dtype=torch.int32, device=device)
    metadata = AttentionMetadata(
        query_start_loc=torch.arange(num_reqs + 1, dtype=torch.int32, device=device) * query_len,
        context_lens=lens,
        seq_lens=lens + query_len,
        block_table=torch.tensor([[2, 0], [1, 3]], dtype=torch.int32, device=device),
        slot_mapping=torch.full((num_reqs * query_len,), -1, device=device),
        max_query_len=query_len,
        uniform=True,
    )
    query = randn(num_reqs * query_len, 4, head_size)
    keys, values = randn(4, PAGE_SIZE, 2, head_size), randn(4, PAGE_SIZE, 2, head_size)
    scale = head_size**-0.5
    sliding_window, soft_cap = 40 if window else None, 2.0 if cap else None
    try:
        backend = FlashAttnBackend()
        result = backend.forward(query, keys, values, metadata, scale, sliding_window, soft_cap)
        torch.cuda.synchronize(device)
    except RuntimeError as said:
        return f"{asked}: this build of flash-attn says: {said}"
    wanted = paged_attention_reference(
        query,
        keys,
        values,
        metadata.block_table,
        metadata.query_start_loc,
        metadata.context_lens,
        metadata.seq_lens,
        query_len,
        scale,
        True,
        sliding_window,
        soft_cap,
    )
    error = (result - wanted).float().abs().max()
    # Sixteen bits keep averages of unit normals to a hundredth; a kernel that is not there is far.
    if not error < 0.05:
        return f"{asked}: this build of flash-attn gives wrong results"
    return None
