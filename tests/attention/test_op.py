"""The opaque operator passes everything on that a direct call does."""

import pytest
import torch

from specdec.verifier.attention.base import AttentionMetadata
from specdec.verifier.attention.op import OpaqueAttention, PagedAttention
from specdec.verifier.attention.sdpa import SdpaBackend
from specdec.verifier.context import set_forward_context
from specdec.verifier.kv_cache import KVCache

NUM_TOKENS = 9


@pytest.fixture
def direct() -> PagedAttention:
    cache = KVCache(
        num_layers=2,
        num_blocks=3,
        block_size=4,
        num_kv_heads=1,
        head_size=16,
        dtype=torch.float32,
        device="cpu",
    )
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, NUM_TOKENS], dtype=torch.int32),
        context_lens=torch.tensor([0], dtype=torch.int32),
        seq_lens=torch.tensor([NUM_TOKENS], dtype=torch.int32),
        block_table=torch.tensor([[2, 0, 1]], dtype=torch.int32),
        slot_mapping=torch.tensor([8, 9, 10, 11, 0, 1, 2, 3, 4]),
        max_query_len=NUM_TOKENS,
        uniform=True,
    )
    return PagedAttention(SdpaBackend("cpu"), cache, metadata)


def test_window_and_cap_reach_the_backend(direct) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(NUM_TOKENS, n, 16, generator=generator) for n in (3, 1, 1))
    positions, cos_sin = torch.arange(NUM_TOKENS), torch.ones(NUM_TOKENS, 16)
    opaque = OpaqueAttention(torch.zeros(NUM_TOKENS, 3, 16))
    results = []
    for options in ({}, {"sliding_window": 3}, {"soft_cap": 0.5}):
        arguments = (query.clone(), key.clone(), value, positions, cos_sin, 1, 0.25)
        results.append(direct(*arguments, **options).clone())
        arguments = (query.clone(), key.clone(), value, positions, cos_sin, 1, 0.25)
        with set_forward_context(
            attn_metadata=direct.metadata,
            kv_cache=direct.kv_cache,
            attn_backend=direct.backend,
        ):
            assert torch.equal(opaque(*arguments, **options), results[-1])
    # Rows within the window are as without one, the next is not.
    assert torch.equal(results[0][:3], results[1][:3])
    assert not torch.equal(results[0][3], results[1][3])
    assert not torch.equal(results[0][1], results[2][1])
