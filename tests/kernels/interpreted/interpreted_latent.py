"""Latent attention against float64, and the bits of its reduction tree."""

from dataclasses import replace

import pytest
import torch
from attention_batch import Batch, make_batch

from specdec.kernels import latent_triton
from specdec.kernels.attention_tree import NODE
from specdec.kernels.attention_triton import Scratch

LEAF = latent_triton.leaf_size(4)
TOLERANCE = 2e-6
LATENT = 24


def latents(contexts, query_lens, *, heads: int = 3, uniform: bool = True, **options) -> Batch:
    """Keys and values are the same memory: [latent, rotated part]."""
    batch = make_batch(
        contexts,
        query_lens,
        uniform=uniform,
        num_heads=heads,
        num_kv_heads=1,
        head_size=LATENT + 8,
        **options,
    )
    return replace(batch, value_cache=batch.key_cache)


def attend(batch: Batch, scratch: Scratch | None = None) -> torch.Tensor:
    return latent_triton.latent_attention(
        *(batch.query, batch.key_cache[:, :, 0], batch.block_table, batch.query_start_loc),
        *(batch.context_lens, batch.seq_lens, batch.max_query_len, batch.scale, batch.uniform),
        LATENT,
        scratch=scratch,
    )


def assert_exact(batch: Batch, scratch: Scratch | None = None) -> None:
    result = attend(batch, scratch).double()
    torch.testing.assert_close(result, batch.exact()[..., :LATENT], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("heads", "block_size"), [(1, 1), (3, 4), (20, 256)])
def test_uniform(heads, block_size) -> None:
    contexts = [0, LEAF - 1, LEAF, LEAF * NODE + 9]
    assert_exact(latents(contexts, [3] * 4, heads=heads, block_size=block_size))


def test_mixed_and_rows_that_see_no_key() -> None:
    batch = latents([0, 12, 0, 20, -1], [9, 5, 0, 1, 3], uniform=False, spare_rows=2)
    assert_exact(batch)
    batch = latents([0, -1, 6], [4] * 3, seq_lens=[0, 3, 8], table_width=5)
    assert_exact(batch)
    assert not attend(batch)[:5].any()


def test_bits_and_scratch(monkeypatch) -> None:
    """Prompt, verify and decode rows, by nodes or all keys at once: the same bits; parts left by
    another launch, NaN here, are never read.
    """
    length = LEAF * NODE + 9
    prompt = latents([0], [length], uniform=False)
    wanted = attend(prompt)
    scratch = Scratch()
    for scratch_bytes in (1 << 30, 0):
        monkeypatch.setattr(latent_triton, "MAX_SCRATCH_BYTES", scratch_bytes)
        for first, query_len in ((0, 5), (LEAF - 3, 5), (LEAF * NODE - 1, 2), (length - 1, 1)):
            rows = replace(
                prompt,
                query=prompt.query[first : first + query_len],
                query_start_loc=torch.tensor([0, query_len], dtype=torch.int32),
                context_lens=torch.tensor([first], dtype=torch.int32),
                seq_lens=torch.tensor([first + query_len], dtype=torch.int32),
                max_query_len=query_len,
                uniform=True,
            )
            assert torch.equal(attend(rows, scratch), wanted[first : first + query_len])
            assert not scratch.counters(1, rows.query).any()
            scratch.parts(0, rows.query).fill_(torch.nan)
