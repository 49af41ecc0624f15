"""The sdpa backend and the plain-PyTorch twin of the kernel, against float64."""

from dataclasses import replace

import pytest
import torch
from attention_batch import HEAD_IDS, HEADS, Batch, border_lengths, make_batch, with_broken_values

from specdec.kernels.attention import paged_attention
from specdec.verifier.attention.base import AttentionMetadata
from specdec.verifier.attention.sdpa import SdpaBackend
from specdec.verifier.attention.select import select_backend
from specdec.verifier.modes import AttentionCGSupport

# Float32 sums of up to 700 terms; the results are averages of numbers of size one.
TOLERANCE = 2e-6


def metadata_of(batch: Batch) -> AttentionMetadata:
    return AttentionMetadata(
        query_start_loc=batch.query_start_loc,
        context_lens=batch.context_lens,
        seq_lens=batch.seq_lens,
        block_table=batch.block_table,
        slot_mapping=torch.full((len(batch.query),), -1),
        max_query_len=batch.max_query_len,
        uniform=batch.uniform,
    )


def by_backend(batch: Batch) -> torch.Tensor:
    backend = SdpaBackend("cpu")
    metadata = metadata_of(batch)
    return backend.forward(
        *(batch.query, batch.key_cache, batch.value_cache, metadata, batch.scale),
        *(batch.sliding_window, batch.soft_cap),
    )


def by_kernel_twin(batch: Batch) -> torch.Tensor:
    return paged_attention(**batch.arguments())


PATHS = pytest.mark.parametrize("attend", [by_backend, by_kernel_twin])


def assert_exact(batch: Batch, result: torch.Tensor) -> None:
    assert result.dtype == batch.query.dtype
    torch.testing.assert_close(result.double(), batch.exact(), rtol=0, atol=TOLERANCE)


@PATHS
@pytest.mark.parametrize("query_len", [1, 2, 5, 8])
@pytest.mark.parametrize("heads", HEADS, ids=HEAD_IDS)
def test_uniform_rows_see_exactly_their_prefix(attend, heads, query_len) -> None:
    """Bottom-right alignment at every border of a block, for each head on its own (C04, C50)."""
    contexts = border_lengths(4)
    batch = make_batch(
        contexts,
        [query_len] * len(contexts),
        uniform=True,
        num_heads=heads[0],
        num_kv_heads=heads[1],
    )
    assert_exact(batch, attend(batch))


@PATHS
@pytest.mark.parametrize("block_size", [1, 2, 16, 256])
@pytest.mark.parametrize("head_size", [16, 80, 75])
def test_block_and_head_sizes(attend, block_size, head_size) -> None:
    batch = make_batch(
        [0, 63, 255, 256],
        [3] * 4,
        uniform=True,
        block_size=block_size,
        head_size=head_size,
    )
    assert_exact(batch, attend(batch))


WINDOWS = pytest.mark.parametrize(
    ("sliding_window", "soft_cap"),
    [(1, None), (5, None), (8, 2.0), (333, None), (None, 2.0), (None, 50.0)],
    ids=str,
)


@PATHS
@WINDOWS
@pytest.mark.parametrize("uniform", [True, False], ids=["uniform", "mixed"])
def test_sliding_windows_and_soft_caps(attend, uniform, sliding_window, soft_cap) -> None:
    """Windows shorter and longer than the run, the block and the text (C41)."""
    batch = make_batch(
        border_lengths(4),
        [5] * 6 if uniform else [9, 1, 2, 0, 75, 5],
        uniform=uniform,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )
    assert_exact(batch, attend(batch))


@PATHS
def test_rows_past_the_last_key_and_its_window_are_zero(attend) -> None:
    """A row drafted less than its batch: the tail stands past ``seq_lens``."""
    batch = make_batch(
        [6, 20, 0], [6] * 3, uniform=True, seq_lens=[7, 22, 0], table_width=8, sliding_window=3
    )
    result = attend(batch)
    assert_exact(batch, result)
    zero = [row for row in range(18) if not result[row].any()]
    assert zero == [3, 4, 5, 10, 11, *range(12, 18)]


@PATHS
def test_a_broken_value_before_the_window_is_not_seen(attend) -> None:
    batch = make_batch([0, 15], [12] * 2, uniform=True, sliding_window=4)
    value_cache = batch.value_cache.clone()
    value_cache[batch.block_table[0, 0], 3] = torch.nan
    value_cache[batch.block_table[1, 3], 3] = torch.inf
    result = attend(replace(batch, value_cache=value_cache))
    sees = torch.zeros(24, dtype=torch.bool)
    sees[3:7] = sees[12:16] = True
    assert result[sees].isnan().all()
    torch.testing.assert_close(result[~sees].double(), batch.exact()[~sees], rtol=0, atol=TOLERANCE)


@PATHS
def test_mixed_lengths_with_empty_requests_and_spare_rows(attend) -> None:
    batch = make_batch([0, 12, 0, 333, 7, 0], [63, 5, 0, 1, 75, 0], uniform=False, spare_rows=3)
    assert_exact(batch, attend(batch))
    assert not attend(batch)[-3:].any()


@PATHS
def test_rows_that_see_no_key_are_zero(attend) -> None:
    """A padding request (no keys), a first row before the text, and a tail past seq_lens."""
    batch = make_batch([0, -1, 6], [4] * 3, uniform=True, seq_lens=[0, 3, 8], table_width=5)
    result = attend(batch)
    assert_exact(batch, result)
    assert not result[:4].any()
    assert not result[4].any()
    assert result[5:].any(dim=-1).all()


@PATHS
def test_a_request_does_not_depend_on_its_neighbours(attend) -> None:
    """P3, bit for bit, for the CPU path; the twin works over a common width and is only close."""
    contexts = [5, 333, 0]
    together = make_batch(contexts, [5] * 3, uniform=True)
    result = attend(together)
    for request in range(3):
        rows = slice(5 * request, 5 * request + 5)
        alone = Batch(
            **together.arguments()
            | {
                "query": together.query[rows],
                "block_table": together.block_table[request : request + 1],
                "query_start_loc": together.query_start_loc[:2],
                "context_lens": together.context_lens[request : request + 1],
                "seq_lens": together.seq_lens[request : request + 1],
            }
        )
        if attend is by_backend:
            assert torch.equal(attend(alone), result[rows])
        else:
            torch.testing.assert_close(attend(alone), result[rows], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rounds_only_the_result(dtype) -> None:
    """Scores and weights stay in float32: the error is that of rounding inputs of P and output."""
    batch = make_batch([0, 100, 333], [5] * 3, uniform=True, head_size=64, dtype=dtype)
    exact = batch.exact()
    rounding = (exact.to(dtype).double() - exact).norm() / exact.norm()
    error = (by_backend(batch).double() - exact).norm() / exact.norm()
    assert error <= 3 * rounding


def test_long_prompts_take_the_fused_path() -> None:
    """Past the limit on scores held in memory PyTorch's fused attention takes over."""
    batch = make_batch([0], [700], uniform=False, num_heads=9, num_kv_heads=3)
    assert 9 * 700 * 700 > 1 << 22
    assert_exact(batch, by_backend(batch))


def test_long_prompts_with_a_cap_go_in_parts() -> None:
    batch = make_batch(
        [3], [700], uniform=False, num_heads=9, num_kv_heads=3, soft_cap=3.0, sliding_window=90
    )
    assert_exact(batch, by_backend(batch))


def test_query_may_be_a_slice_of_the_fused_projection() -> None:
    batch = make_batch([9, 2], [5] * 2, uniform=True)
    wide = torch.randn(10, 6 * 16 + 32)
    wide[:, : 6 * 16] = batch.query.flatten(1)
    sliced = Batch(**batch.arguments() | {"query": wide[:, : 6 * 16].view(10, 6, 16)})
    assert torch.equal(by_backend(sliced), by_backend(batch))


def test_operator_passes_pytorchs_own_check() -> None:
    batch = make_batch([9, 2], [5] * 2, uniform=True)
    tensors = [
        getattr(batch, name)
        for name in (
            "query",
            "key_cache",
            "value_cache",
            "block_table",
            "query_start_loc",
            "context_lens",
            "seq_lens",
        )
    ]
    torch.library.opcheck(torch.ops.specdec.paged_attention_cpu.default, (*tensors, 0.25))


def test_graph_support_is_declared_by_device() -> None:
    assert SdpaBackend("cpu").cg_support is AttentionCGSupport.ALWAYS
    assert SdpaBackend("cuda").cg_support is AttentionCGSupport.UNIFORM_BATCH


def choose(name: str) -> str:
    return select_backend(name, head_size=64, dtype=torch.float32, block_size=16, device="cpu").name


def test_auto_takes_sdpa_on_the_cpu() -> None:
    assert choose("auto") == "sdpa"
    assert choose("sdpa") == "sdpa"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("flash", "choose one of auto, sdpa, triton, mla, flash_attn, flashinfer"),
        ("triton", "runs on CUDA"),
        ("flash_attn", "runs on CUDA"),
        ("flashinfer", "runs on CUDA"),
        ("mla", "it is for latent attention"),
        ("flashmla", "this release has not been run with it"),
    ],
)
def test_backends_that_cannot_serve_are_refused_by_name(name, reason) -> None:
    with pytest.raises(ValueError, match=f"attention_backend.*{name}.*{reason}"):
        choose(name)


@PATHS
@pytest.mark.parametrize("uniform", [True, False], ids=["uniform", "mixed"])
def test_a_broken_value_reaches_only_the_rows_that_see_it(attend, uniform) -> None:
    """Zero times NaN is NaN: a draft's broken value must not end its request's earlier rows."""
    batch = make_batch([0, 15, 16, 130], [5] * 4, uniform=uniform)
    broken, sees = with_broken_values(batch)
    result = attend(broken)
    assert result[sees].isnan().any(-1).all()
    torch.testing.assert_close(result[~sees].double(), batch.exact()[~sees], rtol=0, atol=TOLERANCE)
