"""Our own paged attention kernel: every batch, batch-invariant, captured whole."""

import torch
from torch import Tensor

from specdec.verifier.attention.base import AttentionMetadata, AttentionNeeds
from specdec.verifier.modes import AttentionCGSupport, BatchDescriptor


class TritonBackend:
    """One launch for a uniform batch, its keys shared out over the GPU; one for any other batch.

    A row's bits depend on its own query, keys and position only (``kernels/attention_tree.py``).
    Scratch belongs to the backend and is reused by every layer: run a batch of a shape once before
    capturing it, and replay graphs of one backend on one stream at a time.
    """

    name = "triton"
    cg_support = AttentionCGSupport.ALWAYS
    batch_invariant = True

    def __init__(self) -> None:
        # Triton is imported here, and only where this backend is chosen.
        from specdec.kernels import attention_triton

        self._scratch = attention_triton.Scratch()
        self._paged_attention = attention_triton.paged_attention

    def unsupported(self, needs: AttentionNeeds) -> str | None:
        if needs.device.type != "cuda":
            return f"it runs on CUDA, not on {needs.device.type}"
        if needs.latent_size is not None:
            return "latent attention; that is what 'mla' is for"
        if needs.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"dtype {needs.dtype}; it has bfloat16, float16 and float32"
        if not 16 <= needs.head_size <= 256 or needs.head_size % 8:
            return f"head size {needs.head_size}; it has multiples of 8 from 16 to 256"
        if not 1 <= needs.block_size <= 256 or needs.block_size & (needs.block_size - 1):
            return f"block size {needs.block_size}; it has powers of two from 1 to 256"
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
        return self._paged_attention(
            query,
            key_cache,
            value_cache,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.context_lens,
            metadata.seq_lens,
            metadata.max_query_len,
            scale,
            metadata.uniform,
            sliding_window,
            soft_cap,
            older_keys_stand=metadata.older_keys_stand,
            scratch=self._scratch,
        )
