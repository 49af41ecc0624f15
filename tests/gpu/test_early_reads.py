"""Kernels that read what is old before the kernel in front is over: the bits of those that wait."""

from collections.abc import Iterator

import pytest
import torch
from attention_batch import make_batch

from specdec.kernels import attention_triton, linear_triton, qkv_triton, ready_linear
from specdec.kernels.linear import configure_exact_blas
from specdec.kernels.norm import rms_norm
from specdec.kernels.qkv import qkv_rope_write_kv
from specdec.kernels.ready_linear_triton import ReadyConfig
from specdec.kernels.ready_linear_triton import ready_linear as ready_product
from specdec.kernels.tuning import TileConfig
from specdec.verifier.attention.base import AttentionMetadata
from specdec.verifier.attention.triton import TritonBackend
from specdec.verifier.kv_cache import KVCache
from specdec.verifier.loading import random_weights
from specdec.verifier.models.config import ModelConfig
from specdec.verifier.models.llama import CausalLM
from specdec.verifier.models.rope import RopeConfig

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16]
EPS = 1e-5
TILE = TileConfig(block_n=32, block_k=64, stages=3)


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    configure_exact_blas()
    yield


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


@pytest.mark.parametrize("block", [(16, 8, 4), (16, 8, 2), (32, 8, 4), (32, 8, 8), (64, 16, 4)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_the_skinny_kernel_s_whatever_the_tile(block, dtype) -> None:
    block_n, block_m, num_warps = block
    config = ReadyConfig(block_n=block_n, block_m=block_m, num_warps=num_warps)
    x, weight = randn(16, 576, dtype=dtype), randn(960, 576, dtype=dtype, seed=1)
    residual = randn(16, 960, dtype=dtype, seed=2)
    scale = randn(576, dtype=dtype, seed=3)
    normed = rms_norm(x, scale, EPS)
    for count in (1, 5, 8, 9, 16):
        plain = linear_triton.linear(normed[:count], weight, config=TILE)
        got = ready_product(x[:count], weight, norm=(scale, EPS), config=config)
        assert torch.equal(got, plain)
        added = ready_product(normed[:count], weight, residual=residual[:count], config=config)
        assert torch.equal(added, residual[:count] + plain)


@pytest.mark.parametrize("bias", [False, True])
def test_projection_has_the_bits_of_its_parts(bias) -> None:
    heads, kv_heads, size = 9, 3, 64
    features = (heads + 2 * kv_heads) * size
    x, weight, scale = randn(64, 576), randn(features, 576, seed=1), randn(576, seed=2)
    added = randn(features, seed=3) if bias else None
    table = randn(512, size, dtype=torch.float32, seed=4)
    for count in (1, 2, 5, 8, 9, 15, 16):
        positions = torch.arange(100, 100 + count, device="cuda")
        slots = torch.arange(3, 3 + count, device="cuda")
        slots[count // 2] = -1
        caches = [
            torch.full((6, 16, kv_heads, size), 7.0, device="cuda").bfloat16() for _ in "12kv"
        ]
        rest = (weight, added, table, positions)
        within = qkv_rope_write_kv(x[:count], *rest, *caches[:2], slots, (scale, EPS))
        normed = rms_norm(x[:count], scale, EPS)
        apart = qkv_triton.qkv_rope_write_kv(normed, *rest, *caches[2:], slots, config=TILE)
        assert torch.equal(within, apart)
        assert torch.equal(caches[0], caches[2]) and torch.equal(caches[1], caches[3])


@pytest.mark.parametrize("query_len", [1, 2, 5, 8])
@pytest.mark.parametrize("heads", [(9, 3), (8, 2)], ids=str)
def test_older_keys_first_has_the_bits_of_attention_that_waits(heads, query_len) -> None:
    lengths = [0, 1, 127, 128, 129, 511, 1019, 1024, 8192, 20_001]
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_size": 64, "block_size": 16}
    scratch = attention_triton.Scratch()
    for contexts in (*([length] for length in lengths), lengths[:4], lengths):
        made = make_batch(contexts, [query_len] * len(contexts), uniform=True, **sizes)
        batch = {
            name: (value.bfloat16() if value.is_floating_point() else value).cuda()
            if isinstance(value, torch.Tensor)
            else value
            for name, value in made.arguments().items()
        }
        wanted = attention_triton.paged_attention(**batch)
        for _ in range(2):
            got = attention_triton.paged_attention(**batch, older_keys_stand=True, scratch=scratch)
            assert torch.equal(got, wanted)


def model_of(name: str, dtype: torch.dtype = torch.bfloat16) -> CausalLM:
    sizes = {
        "smollm2": (576, 1536, 9, 3, 64, 49_152),
        "8b": (4096, 14_336, 32, 8, 128, 32_000),
    }[name]
    hidden, ffn, heads, kv_heads, head_size, vocab = sizes
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        max_position_embeddings=2048,
        rms_norm_eps=EPS,
        rope=RopeConfig(rotary_dim=head_size),
    )
    backend = TritonBackend()
    return random_weights(config, std=0.05, dtype=dtype, device="cuda", attention_backend=backend)


class Steps:
    """A pass over inputs that kernels of the pass itself write, from ``sources`` on the device.

    As in a step: first the batch's tensors are made, then the model runs.
    """

    def __init__(self, model: CausalLM, num_reqs: int, query_len: int) -> None:
        self.model, self.num_reqs, self.query_len = model, num_reqs, query_len
        self.cache: KVCache = model.make_kv_cache(num_reqs * 80 + 1, 16)
        generator = torch.Generator("cuda").manual_seed(5)
        self.cache.data.normal_(generator=generator)
        self.kept = self.cache.data.clone()
        blocks = torch.randperm(num_reqs * 80, generator=generator, device="cuda").int()
        # [R, 2 + Q + W]: context, length, ids, blocks; another one each turn.
        self.source = torch.zeros(num_reqs, 2 + query_len + 80, dtype=torch.int32, device="cuda")
        self.blocks = blocks.view(num_reqs, 80)

    def fill(self, turn: int) -> None:
        contexts = (1024, 1019, 127, 128, 3, 600)
        for row in range(self.num_reqs):
            context = contexts[(turn + row) % len(contexts)]
            ids = torch.arange(self.query_len, device="cuda") * 37 + 11 * turn + row
            self.source[row, 0], self.source[row, 1] = context, context + self.query_len
            self.source[row, 2 : 2 + self.query_len] = ids
            self.source[row, 2 + self.query_len :] = self.blocks[row].roll(turn)
        self.cache.data.copy_(self.kept)

    def run(self) -> torch.Tensor:
        length = self.query_len
        context, end = self.source[:, 0].clone(), self.source[:, 1].clone()
        positions = context.long()[:, None] + torch.arange(length, device="cuda")
        table = self.source[:, 2 + length :].clone()
        slots = table.long().gather(1, positions // 16) * 16 + positions % 16
        starts = torch.arange(self.num_reqs + 1, device="cuda", dtype=torch.int32) * length
        ids = self.source[:, 2 : 2 + length].long().flatten()
        metadata = AttentionMetadata(
            query_start_loc=starts,
            context_lens=context,
            seq_lens=end,
            block_table=table,
            slot_mapping=slots.flatten(),
            max_query_len=length,
            uniform=True,
        )
        return self.model(ids, positions.flatten(), self.cache, metadata)


@pytest.mark.parametrize("num_reqs", [1, 3])
@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("name", ["smollm2", "8b"])
@torch.inference_mode()
def test_a_captured_pass_has_the_bits_of_an_eager_one_that_waits(
    name, k, num_reqs, monkeypatch
) -> None:
    """Two passes in one graph, as rounds are, on inputs that change from replay to replay: what an
    early read caught of the replay or the pass before would be another input's."""
    steps = Steps(model_of(name), num_reqs, 1 + k)
    turns = 6
    steps.fill(0)
    with monkeypatch.context() as patch:
        patch.setattr(ready_linear, "MAX_ROWS", 0)
        patch.setattr(attention_triton, "SMALL_HEADS", ())
        wanted = []
        for turn in range(turns):
            steps.fill(turn)
            wanted.append(steps.run().clone())
    assert not any(torch.equal(wanted[0], other) for other in wanted[1:])
    for turn in range(turns):
        steps.fill(turn)
        assert torch.equal(steps.run(), wanted[turn])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = steps.run()
        second = steps.run()
    for turn in [*range(turns), *range(turns)] * 3:
        steps.fill(turn)
        graph.replay()
        assert torch.equal(first, wanted[turn]) and torch.equal(second, wanted[turn])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_a_row_s_bits_do_not_depend_on_the_number_of_requests(dtype) -> None:
    """Up to 16 rows with norms within products, up to 64 and beyond without; a prompt of many."""
    model = model_of("smollm2", dtype)
    whole = Steps(model, 66, 1)
    whole.fill(0)
    wanted = whole.run()
    for count in (1, 2, 5, 8, 9, 15, 16, 17, 64, 65):
        some = Steps(model, count, 1)
        some.blocks, some.cache, some.kept = whole.blocks, whole.cache, whole.kept
        some.fill(0)
        assert torch.equal(some.run(), wanted[:count]), count
