"""Latent attention: the cache holds one vector per token, read as key and as value."""

import torch
from torch import Tensor

from specdec.verifier.attention.base import AttentionMetadata, AttentionNeeds
from specdec.verifier.attention.sdpa import SdpaBackend
from specdec.verifier.modes import AttentionCGSupport, BatchDescriptor

MAX_LATENT_SIZE = 512


class MlaBackend:
    """Our Triton kernel on a GPU, PyTorch on the CPU.

    ``forward`` takes absorbed queries [T, H, C + P] and a cache of one head, [N + 1, B, 1, C + P],
    as keys; the values are its first C features, so ``value_cache`` is not read. It gives
    [T, H, C], to which the value projection is still to be applied. Scratch belongs to the backend:
    run a batch of a shape once before capturing it.
    """

    name = "mla"

    def __init__(self, device: torch.device, latent_size: int | None) -> None:
        self.latent_size = latent_size or 0
        self.batch_invariant = device.type == "cuda"
        self._plain: SdpaBackend | None = None
        self.cg_support = AttentionCGSupport.UNIFORM_BATCH
        if device.type != "cuda":
            self._plain = SdpaBackend(device)
            self.cg_support = self._plain.cg_support
            return
        from specdec.kernels import attention_triton, latent_triton

        self._scratch = attention_triton.Scratch()
        self._latent_attention = latent_triton.latent_attention

    def unsupported(self, needs: AttentionNeeds) -> str | None:
        if needs.latent_size is None:
            return "keys and values apart; it is for latent attention"
        if needs.sliding_window is not None or needs.soft_cap is not None:
            return "a sliding window or soft cap over latents"
        if needs.device.type != "cuda":
            return None
        if needs.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"dtype {needs.dtype}; it has bfloat16, float16 and float32"
        if not 16 <= needs.latent_size <= MAX_LATENT_SIZE or needs.latent_size % 8:
            return (
                f"latent size {needs.latent_size}; it has multiples of 8 from 16 to "
                f"{MAX_LATENT_SIZE}"
            )
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
        assert sliding_window is None and soft_cap is None
        if self._plain is not None:
            out = self._plain.forward(query, key_cache, key_cache, metadata, scale)
            return out[..., : self.latent_size]
        return self._latent_attention(
            query,
            key_cache[:, :, 0],
            metadata.block_table,
            metadata.query_start_loc,
            metadata.context_lens,
            metadata.seq_lens,
            metadata.max_query_len,
            scale,
            metadata.uniform,
            self.latent_size,
            scratch=self._scratch,
        )
