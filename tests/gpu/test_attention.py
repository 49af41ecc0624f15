"""The Triton attention backend on a GPU: bits, scratch, races.

Accuracy, graphs and poison are the conformance suite's (``tests/attention``).
"""

from dataclasses import replace

import pytest
import torch
from attention_batch import Batch, make_batch

from specdec.kernels import attention_triton
from specdec.kernels.attention import paged_attention
from specdec.kernels.attention_tree import NODE, leaf_size
from specdec.verifier.attention.base import AttentionMetadata
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


def by_backend(backend: TritonBackend, batch: Batch) -> torch.Tensor:
    metadata = metadata_of(batch)
    return backend.forward(batch.query, batch.key_cache, batch.value_cache, metadata, batch.scale)


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


@pytest.mark.parametrize("query_len", [1, 5, 9])
@pytest.mark.parametrize(("heads", "head_size"), [((32, 8), 128), ((9, 3), 64)], ids=str)
def test_bits_depend_neither_on_slices_nor_on_asking_ahead(heads, head_size, query_len) -> None:
    """Values cut by their features, parts read before they are folded: the default's bits, with
    one leaf, one node and several, alone and beside others."""
    leaf = leaf_size(head_size, 2)
    lengths = [0, 1, leaf - 1, leaf, leaf * NODE - 2, leaf * NODE, leaf * 9 + 5, leaf * 70 + 1]
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_size": head_size}
    sizes |= {"uniform": True, "block_size": 16}
    batches = [gpu_batch([length], [query_len], **sizes) for length in lengths]
    batches += [gpu_batch(lengths, [query_len] * len(lengths), **sizes)]
    batches += [gpu_batch([leaf * 5 + 9], [query_len], sliding_window=leaf * 3, **sizes)]
    for slices, ahead, warps, per_sm in (
        *((1, True, 4, 1), (2, False, 4, 1), (2, True, 8, 1), (4, True, 4, 1)),
        *((1, True, 4, 2), (2, False, 4, 2), (1, False, 8, 2)),
    ):
        config = attention_triton.TileConfig(
            num_warps=warps,
            stages=2,
            slices=slices,
            ahead=ahead,
            programs_per_sm=per_sm,
            leaves_per_sm=per_sm,
        )
        scratch = attention_triton.Scratch()
        for batch in batches:
            wanted = attention_triton.paged_attention(**batch.arguments())
            for _ in range(3):
                got = attention_triton.paged_attention(
                    **batch.arguments(), scratch=scratch, config=config
                )
                assert torch.equal(got, wanted), (config, batch.context_lens)


@pytest.mark.parametrize(
    ("heads", "head_size", "dtype", "options"),
    [
        ((32, 8), 128, BF16, {}),
        ((9, 3), 64, BF16, {}),
        ((7, 1), 80, FP16, {}),
        ((6, 2), 64, FP32, {}),
        ((8, 4), 256, BF16, {"sliding_window": 100, "soft_cap": 50.0}),
        ((9, 3), 64, BF16, {"sliding_window": 700}),
    ],
    ids=str,
)
def test_bits_do_not_depend_on_the_batch(heads, head_size, dtype, options, monkeypatch) -> None:
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
        **options,
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


def test_a_window_longer_than_the_text_changes_no_bit() -> None:
    batch = gpu_batch([0, 700, 4097], [5] * 3, uniform=True, head_size=64, block_size=16)
    for uniform in (True, False):
        plain = replace(batch, uniform=uniform)
        wanted = paged_attention(**plain.arguments())
        windowed = replace(plain, sliding_window=5000)
        assert torch.equal(paged_attention(**windowed.arguments()), wanted)


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
