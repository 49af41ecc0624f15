"""The Triton attention backend on a GPU, and sdpa beside it: accuracy, bits, graphs, poison.

An error is measured against float64 and may be at most twice that of PyTorch's own attention in
the same dtype, which reads the same keys without pages.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from attention_batch import HEAD_IDS, HEADS, Batch, border_lengths, make_batch

from specdec.kernels import attention_triton
from specdec.kernels.attention import paged_attention
from specdec.kernels.attention_tree import NODE, leaf_size
from specdec.verifier.attention.base import AttentionMetadata
from specdec.verifier.attention.sdpa import SdpaBackend
from specdec.verifier.attention.triton import TritonBackend

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def on_gpu(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch on the GPU, floats in ``dtype`` (the exact result is that of the rounded ones)."""
    moved = {}
    for name, value in batch.arguments().items():
        if isinstance(value, torch.Tensor):
            value = value.cuda().to(dtype) if value.is_floating_point() else value.cuda()
        moved[name] = value
    return Batch(**moved)


def gpu_batch(*args: object, dtype: torch.dtype = BF16, **options: object) -> Batch:
    return on_gpu(make_batch(*args, **options), dtype)  # type: ignore[arg-type]


def plain_attention(batch: Batch) -> torch.Tensor:
    """PyTorch's attention in the batch's dtype, request by request over contiguous keys."""
    out = torch.zeros_like(batch.query)
    group = batch.query.shape[1] // batch.key_cache.shape[2]
    starts = batch.query_start_loc.tolist()
    for request, context_len in enumerate(batch.context_lens.tolist()):
        keys, values = (
            part.repeat_interleave(group, dim=1).transpose(0, 1)
            for part in batch.keys_and_values(request)
        )
        start, end = starts[request], starts[request + 1]
        last = torch.arange(end - start, device="cuda")[:, None] + context_len
        mask = torch.arange(keys.shape[1], device="cuda") <= last
        rows = batch.query[start:end].transpose(0, 1)
        mixed = F.scaled_dot_product_attention(rows, keys, values, mask, scale=batch.scale)
        out[start:end] = torch.where(mask.any(-1)[:, None, None], mixed.transpose(0, 1), 0)
    return out


def error(result: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Relative error of each head."""
    assert result.isfinite().all()
    return (result.double() - exact).norm(dim=(0, 2)) / exact.norm(dim=(0, 2))


def assert_as_good(batch: Batch) -> None:
    exact = on_gpu(batch_on_cpu(batch), torch.float64).exact()
    limit = 2 * error(plain_attention(batch), exact) + 1e-7
    for result in (paged_attention(**batch.arguments()), by_sdpa(batch)):
        assert result.dtype == batch.query.dtype
        assert (error(result, exact) <= limit).all()
        assert not result[~batch_rows(batch)].any()


def batch_rows(batch: Batch) -> torch.Tensor:
    return torch.arange(len(batch.query), device="cuda") < batch.query_start_loc[-1]


def batch_on_cpu(batch: Batch) -> Batch:
    return Batch(
        **{
            name: value.cpu() if isinstance(value, torch.Tensor) else value
            for name, value in batch.arguments().items()
        }
    )


def metadata_of(batch: Batch) -> AttentionMetadata:
    return AttentionMetadata(
        query_start_loc=batch.query_start_loc,
        context_lens=batch.context_lens,
        seq_lens=batch.seq_lens,
        block_table=batch.block_table,
        slot_mapping=torch.full((len(batch.query),), -1, device="cuda"),
        max_query_len=batch.max_query_len,
        uniform=batch.uniform,
    )


def by_backend(backend: SdpaBackend | TritonBackend, batch: Batch) -> torch.Tensor:
    metadata = metadata_of(batch)
    return backend.forward(batch.query, batch.key_cache, batch.value_cache, metadata, batch.scale)


def by_sdpa(batch: Batch) -> torch.Tensor:
    return by_backend(SdpaBackend("cuda"), batch)


@pytest.mark.parametrize("heads", HEADS, ids=HEAD_IDS)
def test_uniform_heads(heads) -> None:
    """Each head sees its own keys, at every border of a block and far into the cache (C04, C50)."""
    contexts = [*border_lengths(16), 4097, 700]
    batch = gpu_batch(
        contexts,
        [5] * len(contexts),
        uniform=True,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=64,
        block_size=16,
    )
    assert_as_good(batch)


@pytest.mark.parametrize(
    ("head_size", "block_size", "query_len", "dtype"),
    [
        (16, 4, 5, BF16),
        (64, 16, 1, BF16),
        (64, 1, 2, BF16),
        (64, 256, 8, BF16),
        (80, 16, 5, BF16),
        (96, 16, 5, BF16),
        (128, 16, 5, BF16),
        (128, 16, 17, BF16),
        (256, 16, 5, BF16),
        (64, 16, 5, FP16),
        (16, 4, 5, FP32),
        (128, 16, 5, FP32),
        (256, 16, 2, FP32),
    ],
    ids=str,
)
def test_uniform_sizes(head_size, block_size, query_len, dtype) -> None:
    contexts = [*border_lengths(block_size), 1025, 63]
    batch = gpu_batch(
        contexts,
        [query_len] * len(contexts),
        uniform=True,
        num_heads=9,
        num_kv_heads=3,
        head_size=head_size,
        block_size=block_size,
        dtype=dtype,
    )
    assert_as_good(batch)


@pytest.mark.parametrize(
    ("heads", "head_size", "block_size", "dtype"),
    [
        ((6, 2), 16, 4, BF16),
        ((9, 3), 64, 16, BF16),
        ((7, 1), 80, 1, BF16),
        ((28, 4), 128, 16, BF16),
        ((48, 2), 64, 16, BF16),
        ((3, 3), 256, 16, BF16),
        ((8, 1), 64, 16, FP16),
        ((6, 2), 64, 16, FP32),
    ],
    ids=str,
)
def test_mixed(heads, head_size, block_size, dtype) -> None:
    batch = gpu_batch(
        [0, 12, 0, 333, 700, -1, 0],
        [333, 5, 0, 1, 75, 3, 63],
        uniform=False,
        spare_rows=3,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=head_size,
        block_size=block_size,
        dtype=dtype,
    )
    assert_as_good(batch)


def test_rows_that_see_no_key_are_zero() -> None:
    for uniform in (True, False):
        batch = gpu_batch([0, -1, 6], [4] * 3, uniform=uniform, seq_lens=[0, 3, 8], table_width=5)
        assert_as_good(batch)
        assert not paged_attention(**batch.arguments())[:5].any()


def one_request(prompt: Batch, first: int, query_len: int, uniform: bool) -> Batch:
    """Rows ``first .. first + query_len - 1`` of a prompt, the keys before them cached."""
    return replace(
        prompt,
        query=prompt.query[first : first + query_len],
        query_start_loc=torch.tensor([0, query_len], dtype=torch.int32, device="cuda"),
        context_lens=torch.tensor([first], dtype=torch.int32, device="cuda"),
        seq_lens=torch.tensor([first + query_len], dtype=torch.int32, device="cuda"),
        max_query_len=query_len,
        uniform=uniform,
    )


@pytest.mark.parametrize(
    ("heads", "head_size", "dtype"),
    [((32, 8), 128, BF16), ((9, 3), 64, BF16), ((7, 1), 80, FP16), ((6, 2), 64, FP32)],
    ids=str,
)
def test_bits_do_not_depend_on_the_batch(heads, head_size, dtype, monkeypatch) -> None:
    """A row of a prompt has the same bits in the whole prompt, in chunks of any size, verified
    1 + k at a time, decoded alone, and beside other requests; with leaves, nodes or all keys as
    the unit of work (P3)."""
    leaf = leaf_size(head_size, dtype.itemsize)
    length = leaf * (2 * NODE + 1) + 37
    prompt = gpu_batch(
        [0],
        [length],
        uniform=False,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=head_size,
        block_size=16,
        dtype=dtype,
    )
    wanted = paged_attention(**prompt.arguments())
    for chunk in (1, 7, 64, 333):
        for first in range(0, length, chunk * (1 if chunk > 7 else 97)):
            size = min(chunk, length - first)
            rows = paged_attention(**one_request(prompt, first, size, False).arguments())
            assert torch.equal(rows, wanted[first : first + size]), (chunk, first)

    borders = {0, 1, leaf - 3, leaf, leaf * NODE - 2, leaf * NODE, 2 * leaf * NODE - 4}
    firsts = sorted(borders | set(range(0, length - 17, 61)))
    programs = attention_triton.num_programs(torch.device("cuda"), 1)
    for count, scratch_bytes in ((programs, 1 << 28), (1, 1 << 28), (1, 0)):
        monkeypatch.setattr(attention_triton, "num_programs", lambda *_, n=count: n)
        monkeypatch.setattr(attention_triton, "MAX_SCRATCH_BYTES", scratch_bytes)
        for query_len in (1, 2, 5, 8, 17):
            for first in firsts:
                verified = one_request(prompt, first, query_len, True)
                rows = paged_attention(**verified.arguments())
                assert torch.equal(rows, wanted[first : first + query_len]), (query_len, first)
    monkeypatch.undo()

    # Many requests that share the prompt's blocks, each at its own place.
    table = prompt.block_table.expand(len(firsts), -1).contiguous()
    table = torch.cat([table, table.new_zeros(len(firsts), 3)], dim=1)
    starts = torch.tensor(firsts, device="cuda")
    for query_len in (1, 5):
        index = (starts[:, None] + torch.arange(query_len, device="cuda")).flatten()
        together = replace(
            prompt,
            query=prompt.query[index],
            block_table=table,
            query_start_loc=torch.arange(
                0, len(index) + 1, query_len, dtype=torch.int32, device="cuda"
            ),
            context_lens=starts.int(),
            seq_lens=starts.int() + query_len,
            max_query_len=query_len,
            uniform=True,
        )
        assert torch.equal(paged_attention(**together.arguments()), wanted[index])
        mixed = replace(together, uniform=False)
        assert torch.equal(paged_attention(**mixed.arguments()), wanted[index])


@pytest.mark.parametrize("name", ["triton", "sdpa"])
def test_a_graph_reads_the_lengths_of_the_step(name) -> None:
    """Captured on one-token contexts, replayed as they grow past every border: each slot equals
    eager, and padding requests stay zero (C26, C30)."""
    contexts = [1, 15, 16, 17, 333, 1000, 0, 0]
    batch = gpu_batch(
        contexts,
        [5] * 8,
        uniform=True,
        seq_lens=[c + 5 for c in contexts[:6]] + [0, 0],
        num_heads=9,
        num_kv_heads=3,
        head_size=64,
        block_size=16,
    )
    backend = TritonBackend() if name == "triton" else SdpaBackend("cuda")
    static = replace(
        batch,
        context_lens=torch.ones_like(batch.context_lens),
        seq_lens=torch.full_like(batch.seq_lens, 6),
        block_table=torch.zeros_like(batch.block_table),
    )
    by_backend(backend, static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = by_backend(backend, static)
    for seq_lens in (batch.seq_lens, batch.seq_lens.clamp(max=21), batch.seq_lens * 0):
        static.block_table.copy_(batch.block_table)
        static.seq_lens.copy_(seq_lens)
        static.context_lens.copy_(torch.where(seq_lens > 0, seq_lens - 5, 0))
        for _ in range(3):
            out.fill_(torch.nan)
            graph.replay()
        assert torch.equal(out, by_backend(backend, static))
        assert not out[30:].any()
        assert out.isfinite().all()


def test_scratch_grows_only_outside_a_capture() -> None:
    """A batch that needs more scratch than there is refuses to be captured by name, and a graph
    captured before the scratch grew still gives its results (C35)."""
    small = gpu_batch([700], [5], uniform=True, head_size=64, block_size=16)
    large = gpu_batch([4097] * 8, [5] * 8, uniform=True, head_size=64, block_size=16)
    backend = TritonBackend()
    wanted = by_backend(backend, small)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = by_backend(backend, small)
    with pytest.raises(RuntimeError, match="scratch"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        by_backend(backend, large)
    torch.cuda.synchronize()
    by_backend(backend, large)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, wanted)


def test_repeated_launches_agree() -> None:
    """A race between programs would show as a result that changes: 300 launches, one answer."""
    batch = gpu_batch(
        [1023, 8000, 5],
        [5] * 3,
        uniform=True,
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        block_size=16,
    )
    backend = TritonBackend()
    wanted = by_backend(backend, batch)
    for _ in range(300):
        assert torch.equal(by_backend(backend, batch), wanted)
