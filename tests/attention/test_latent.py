"""Latent attention: accuracy, rows without keys, bits, graphs, and what is written to the cache."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from attention_batch import Batch, make_batch
from attention_cases import DTYPES, assert_a_graph_follows, assert_as_good, attend, on

from specdec.kernels.latent_attention import latent_attention, write_latent
from specdec.verifier.attention.mla import MlaBackend
from specdec.verifier.graph import GraphPool
from specdec.verifier.modes import AttentionCGSupport

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """DeepSeek-V2-Lite's by default; ``rotated`` features follow the latent."""

    heads: int = 16
    latent: int = 512
    rotated: int = 64
    dtype: str = "bf16"
    block_size: int = 16

    def __str__(self) -> str:
        sizes = f"{self.heads}x{self.latent}+{self.rotated}"
        return f"{sizes}-{self.dtype}-block{self.block_size}"

    def batch(
        self,
        device: str,
        contexts: Sequence[int],
        query_lens: Sequence[int],
        *,
        uniform: bool = True,
        seq_lens: Sequence[int] | None = None,
        table_width: int | None = None,
    ) -> Batch:
        batch = make_batch(
            contexts,
            query_lens,
            uniform=uniform,
            num_heads=self.heads,
            num_kv_heads=1,
            head_size=self.latent + self.rotated,
            block_size=self.block_size,
            seq_lens=seq_lens,
            table_width=table_width,
        )
        batch = on(device, DTYPES[self.dtype], batch)
        return replace(batch, value_cache=batch.key_cache)


TINY = Shape(heads=3, latent=24, rotated=8, dtype="fp32", block_size=4)
SHAPES = [
    Shape(),
    Shape(heads=20, latent=128),
    Shape(block_size=1, dtype="fp16"),
    Shape(heads=4, latent=64, rotated=16, dtype="fp32", block_size=256),
    TINY,
]


def by_shape(shapes: Sequence[Shape]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("shape", shapes, ids=str)


@DEVICES
@by_shape(SHAPES)
@pytest.mark.parametrize("query_len", [1, 5, 9])
def test_uniform(device, shape, query_len) -> None:
    contexts = [0, 1, shape.block_size - 1, shape.block_size, shape.block_size + 1, 333, -1]
    batch = shape.batch(device, contexts, [query_len] * 7)
    assert_as_good(MlaBackend(torch.device(device), shape.latent), batch, shape.latent)


@pytest.mark.gpu
@pytest.mark.parametrize("query_len", [1, 5])
def test_many_heads(query_len) -> None:
    """DeepSeek-V3's 128."""
    shape = Shape(heads=128)
    batch = shape.batch("cuda", [0, 15, 16, 1000], [query_len] * 4)
    assert_as_good(MlaBackend(torch.device("cuda"), shape.latent), batch, shape.latent)


@DEVICES
@by_shape([Shape(heads=4), TINY])
def test_mixed_short_and_padding_rows(device, shape) -> None:
    backend = MlaBackend(torch.device(device), shape.latent)
    mixed = shape.batch(device, [0, 12, 0, 333, -1], [75, 5, 0, 1, 3], uniform=False)
    assert_as_good(backend, mixed, shape.latent)
    short = shape.batch(device, [6, 300, 0], [5] * 3, seq_lens=[7, 303, 0], table_width=80)
    assert_as_good(backend, short, shape.latent)


@DEVICES
@by_shape([TINY])
def test_the_kernel_and_the_backend_agree(device, shape) -> None:
    batch = shape.batch(device, [0, 70], [5, 5])
    result = latent_attention(
        *(batch.query, batch.key_cache[:, :, 0], batch.block_table, batch.query_start_loc),
        *(batch.context_lens, batch.seq_lens, batch.max_query_len, batch.scale, batch.uniform),
        shape.latent,
    )
    other = attend(MlaBackend(torch.device(device), shape.latent), batch)
    torch.testing.assert_close(result, other, rtol=0, atol=3e-6)


@DEVICES
@by_shape([Shape(), TINY])
def test_a_graph_follows_the_lengths_of_the_step(device, shape) -> None:
    backend = MlaBackend(torch.device(device), shape.latent)
    assert backend.cg_support >= AttentionCGSupport.UNIFORM_BATCH
    batch = shape.batch(device, [0, 15, 16, 333, 1000], [5] * 5)
    pool = GraphPool(device)
    assert_a_graph_follows(backend, batch, lambda fn: pool.capture(fn).replay)


@pytest.mark.gpu
@by_shape([Shape(), Shape(heads=4, latent=64, rotated=16, dtype="fp32")])
def test_bits_do_not_depend_on_the_batch(shape) -> None:
    """Rows of a prompt, verified 1 + k at a time, decoded alone and beside others (P3)."""
    backend = MlaBackend(torch.device("cuda"), shape.latent)
    length = 600
    prompt = shape.batch("cuda", [0], [length], uniform=False)
    wanted = attend(backend, prompt)
    firsts = [0, 1, 61, 64, 254, 256, 510, length - 9]
    for query_len in (1, 5, 9):
        index = torch.tensor(firsts)[:, None] + torch.arange(query_len)
        starts = torch.tensor(firsts, dtype=torch.int32, device="cuda")
        together = replace(
            prompt,
            query=prompt.query[index.flatten().cuda()],
            block_table=prompt.block_table.expand(len(firsts), -1).contiguous(),
            query_start_loc=torch.arange(len(firsts) + 1, device="cuda").int() * query_len,
            context_lens=starts,
            seq_lens=starts + query_len,
            max_query_len=query_len,
            uniform=True,
        )
        result = attend(backend, together)
        assert torch.equal(result, wanted[index.flatten().cuda()])
        for request in (0, len(firsts) - 1):
            alone = replace(
                together,
                query=together.query[request * query_len : (request + 1) * query_len],
                block_table=together.block_table[:1],
                query_start_loc=together.query_start_loc[:2],
                context_lens=starts[request : request + 1],
                seq_lens=starts[request : request + 1] + query_len,
            )
            rows = slice(request * query_len, (request + 1) * query_len)
            assert torch.equal(attend(backend, alone), result[rows])


@DEVICES
@by_shape([Shape(heads=4), TINY])
def test_a_broken_latent_reaches_only_the_rows_that_see_it(device, shape) -> None:
    backend = MlaBackend(torch.device(device), shape.latent)
    batch = shape.batch(device, [9], [5])
    wanted = attend(backend, batch)
    latent = torch.ones(1, shape.latent, device=device, dtype=DTYPES[shape.dtype])
    latent[0, 3] = torch.inf
    position = 11
    slot = int(batch.block_table[0, position // shape.block_size]) * shape.block_size
    slot += position % shape.block_size
    cache = batch.key_cache.clone()
    rotated = latent.new_zeros(1, shape.rotated)
    write_latent(latent, rotated, cache[:, :, 0], torch.tensor([slot], device=device))
    result = attend(backend, replace(batch, key_cache=cache, value_cache=cache))
    assert torch.equal(result[:2], wanted[:2])
    assert result[2:].isnan().all()


@DEVICES
def test_writing_latents(device) -> None:
    generator = torch.Generator().manual_seed(0)
    latent, rotated = torch.randn(4, 24, generator=generator), torch.randn(4, 8)
    rotated[2, 1] = torch.nan
    cache = torch.zeros(4, 2, 32)
    wanted = cache.clone()
    wanted[2, 1], wanted[0, 0] = (
        torch.cat([latent[0], rotated[0]]),
        torch.cat([latent[1], rotated[1]]),
    )
    wanted[1, 1, 24:] = torch.nan
    latent, rotated, cache = latent.to(device), rotated.to(device), cache.to(device)
    write_latent(latent, rotated, cache, torch.tensor([5, 0, 3, -1], device=device))
    torch.testing.assert_close(cache.cpu()[:3], wanted[:3], rtol=0, atol=0, equal_nan=True)
    # The last block takes what is written nowhere.
    assert torch.equal(cache.cpu()[3, 1], wanted[3, 1])
