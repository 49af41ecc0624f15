"""Paged attention against float64, and the bits of its reduction tree."""

from dataclasses import replace

import pytest
import torch
from attention_batch import HEAD_IDS, HEADS, Batch, make_batch

from specdec.kernels import attention_triton
from specdec.kernels.attention_tree import NODE, leaf_size

LEAF = leaf_size(16, 4)
TOLERANCE = 2e-6


def attend(batch: Batch, scratch: attention_triton.Scratch | None = None) -> torch.Tensor:
    return attention_triton.paged_attention(**batch.arguments(), scratch=scratch)


def assert_exact(batch: Batch, scratch: attention_triton.Scratch | None = None) -> None:
    result = attend(batch, scratch)
    torch.testing.assert_close(result.double(), batch.exact(), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("heads", HEADS, ids=HEAD_IDS)
def test_uniform(heads) -> None:
    """Bottom-right alignment at the borders of blocks, for each head on its own."""
    group = heads[0] // heads[1]
    query_len = 5 if group < 8 else 1
    contexts = [0, 1, 15, 16, 17, 75]
    batch = make_batch(
        contexts,
        [query_len] * len(contexts),
        uniform=True,
        num_heads=group * min(2, heads[1]),
        num_kv_heads=min(2, heads[1]),
        block_size=16,
    )
    assert_exact(batch)


@pytest.mark.parametrize(("head_size", "block_size"), [(64, 1), (80, 256), (96, 4), (128, 32)])
def test_head_and_block_sizes(head_size, block_size) -> None:
    sizes = {"head_size": head_size, "block_size": block_size, "num_heads": 3, "num_kv_heads": 1}
    assert_exact(make_batch([0, 75, 130], [2] * 3, uniform=True, **sizes))
    assert_exact(make_batch([0, 75], [33, 2], uniform=False, **sizes))


def test_many_rows_for_one_head_take_several_tiles() -> None:
    assert_exact(make_batch([70], [17], uniform=True, num_heads=8, num_kv_heads=1))


def test_mixed_lengths_with_empty_requests_and_spare_rows() -> None:
    batch = make_batch([0, 12, 0, 150, 7, -1], [63, 5, 0, 1, 20, 3], uniform=False, spare_rows=3)
    assert_exact(batch)


@pytest.mark.parametrize(
    ("sliding_window", "soft_cap"),
    [(1, None), (LEAF, 2.0), (LEAF * NODE + 3, None)],
    ids=str,
)
def test_sliding_windows_and_soft_caps(sliding_window, soft_cap) -> None:
    options = {"sliding_window": sliding_window, "soft_cap": soft_cap, "num_heads": 3}
    contexts = [1, LEAF - 1, LEAF, LEAF * NODE, LEAF * NODE + 70]
    assert_exact(make_batch(contexts, [3] * 5, uniform=True, num_kv_heads=1, **options))
    assert_exact(make_batch([0, 0, 200], [40, 0, 1], uniform=False, num_kv_heads=1, **options))


def test_a_window_longer_than_the_text_changes_no_bit() -> None:
    for uniform in (True, False):
        batch = make_batch([0, LEAF * NODE + 3], [2, 2], uniform=uniform)
        wanted = attend(batch)
        assert torch.equal(attend(replace(batch, sliding_window=500)), wanted)


def test_rows_past_the_last_key_and_its_window_are_zero() -> None:
    batch = make_batch(
        [6, 40, 0, LEAF * NODE],
        [6] * 4,
        uniform=True,
        seq_lens=[7, 42, 0, LEAF * NODE + 1],
        table_width=70,
        sliding_window=3,
    )
    assert_exact(batch)
    assert_exact(replace(batch, uniform=False))


@pytest.mark.parametrize("cap", [0.05, 0.62, 30.0])
def test_soft_cap_is_a_tanh(cap) -> None:
    """Scores from far below the cap to far above it, to a few units in the last place."""
    assert_exact(make_batch([40], [2], uniform=True, head_size=64, soft_cap=cap))


def test_rows_that_see_no_key_are_zero() -> None:
    for uniform in (True, False):
        batch = make_batch([0, -1, 6], [4] * 3, uniform=uniform, seq_lens=[0, 3, 8], table_width=5)
        assert_exact(batch)
        assert not attend(batch)[:5].any()


def test_scratch_is_left_ready_for_the_next_launch() -> None:
    """Counters return to zero, and parts left by another launch, NaN here, are never read."""
    scratch = attention_triton.Scratch()
    for contexts in ([200, 3], [0, 33], [150, 150]):
        batch = make_batch(contexts, [2, 2], uniform=True, table_width=60)
        assert_exact(batch, scratch)
        assert not scratch.counters(1, batch.query).any()
        scratch.parts(1, batch.query).fill_(torch.nan)
    assert len(scratch._kept) == 2


def test_whole_tiles_where_they_balance(monkeypatch) -> None:
    """Many tiles for few programs: no part is stored, and the bits are those of each row alone."""
    length = LEAF * NODE + 9
    batch = make_batch([length] * 3, [1] * 3, uniform=True, num_heads=4, num_kv_heads=2)
    alone = [attend(solo(batch, request, 0, 1)) for request in range(3)]
    scratch = attention_triton.Scratch()
    monkeypatch.setattr(attention_triton, "num_programs", lambda *_: 1)
    scratch.parts(1 << 16, batch.query).fill_(7.0)
    assert torch.equal(attend(batch, scratch), torch.cat(alone))
    assert (scratch.parts(1, batch.query) == 7.0).all()


@pytest.mark.parametrize(
    ("slices", "ahead", "keys_first"), [(2, False, False), (2, True, False), (2, True, True)]
)
def test_bits_depend_neither_on_slices_nor_on_when_things_are_read(
    slices, ahead, keys_first, monkeypatch
) -> None:
    """Values cut by their features, parts read before they are folded, older keys before newer
    ones: the same bits, with leaves, nodes or all keys as the unit of work, for one request and
    for several."""
    config = attention_triton.TileConfig(
        num_warps=4, stages=1, slices=slices, ahead=ahead, keys_first=keys_first
    )
    sizes = {"uniform": True, "num_heads": 2, "num_kv_heads": 1, "head_size": 32}
    lengths = [0, LEAF - 5, LEAF * (NODE + 1) + 7]
    batches = [make_batch([length], [3], **sizes) for length in lengths]
    batches += [make_batch(lengths, [2] * len(lengths), **sizes)]
    # The first leaf in the window is the third of its node.
    batches += [make_batch(lengths[2:], [3], sliding_window=LEAF * 3, **sizes)]
    wanted = [attend(batch) for batch in batches]
    for programs, scratch_bytes in ((1000, 1 << 30), (1, 1 << 30), (1, 0)):
        monkeypatch.setattr(attention_triton, "num_programs", lambda *_, n=programs: n)
        monkeypatch.setattr(attention_triton, "MAX_SCRATCH_BYTES", scratch_bytes)
        for batch, expected in zip(batches, wanted, strict=True):
            scratch = attention_triton.Scratch()
            for _ in range(2):
                got = attention_triton.paged_attention(
                    **batch.arguments(), scratch=scratch, config=config
                )
                assert torch.equal(got, expected)


def test_keys_first_is_refused_for_head_sizes_that_it_does_not_cover() -> None:
    config = attention_triton.TileConfig(num_warps=4, stages=1, keys_first=True)
    batch = make_batch([5], [2], uniform=True, num_kv_heads=1, num_heads=2, head_size=24)
    with pytest.raises(ValueError, match="head size 24 is no multiple of 16"):
        attention_triton.paged_attention(**batch.arguments(), config=config)


def solo(batch: Batch, request: int, first: int, query_len: int) -> Batch:
    """Rows ``first .. first + query_len - 1`` of one request as a uniform batch of their own."""
    start = int(batch.query_start_loc[request]) + first
    context = batch.context_lens[request : request + 1] + first
    return replace(
        batch,
        query=batch.query[start : start + query_len],
        block_table=batch.block_table[request : request + 1],
        query_start_loc=torch.tensor([0, query_len], dtype=torch.int32),
        context_lens=context,
        seq_lens=context + query_len,
        max_query_len=query_len,
        uniform=True,
    )


@pytest.mark.parametrize(("sliding_window", "soft_cap"), [(None, None), (LEAF + 5, 2.0)], ids=str)
def test_bits_do_not_depend_on_the_split(monkeypatch, sliding_window, soft_cap) -> None:
    """One prompt over leaf and node borders, and each of its rows decoded or verified alone with
    leaves, nodes or all keys as the unit of work: the same bits."""
    length = LEAF * (NODE + 1) + 7
    batch = make_batch(
        [0],
        [length],
        uniform=False,
        num_heads=3,
        num_kv_heads=1,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )
    prompt = attend(batch)
    for programs, scratch_bytes in ((1000, 1 << 30), (1, 1 << 30), (1, 0)):
        monkeypatch.setattr(attention_triton, "num_programs", lambda *_, n=programs: n)
        monkeypatch.setattr(attention_triton, "MAX_SCRATCH_BYTES", scratch_bytes)
        for first, query_len in ((0, 5), (LEAF - 3, 5), (LEAF * NODE - 1, 2), (length - 1, 1)):
            rows = attend(solo(batch, 0, first, query_len))
            assert torch.equal(rows, prompt[first : first + query_len])
