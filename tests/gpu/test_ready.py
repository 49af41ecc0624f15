"""Small layers with their weights on hand: no bit differs from the kernels they stand for."""

import pytest
import torch

from specdec.kernels import attention_triton, ready_linear
from specdec.kernels.linear import configure_exact_blas, linear_add, linear_silu_mul
from specdec.kernels.norm import rms_norm
from specdec.kernels.ready_linear import norm_linear_silu_mul, ready_linear_add
from specdec.verifier.attention.base import AttentionMetadata
from specdec.verifier.attention.select import select_backend
from specdec.verifier.loading import random_weights
from specdec.verifier.models.config import config_from_json

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
EPS = 1e-5
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 2048,
    "max_position_embeddings": 8192,
    "rms_norm_eps": EPS,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
BLOCK = 16


def randn(*shape, scale=1.0):
    return torch.randn(*shape, device="cuda", dtype=BF16) * scale


@pytest.mark.parametrize(("depth", "features"), [(576, 3072), (1536, 576), (2048, 512), (96, 64)])
def test_bits_of_layers(depth, features):
    """Up to 16 rows, against the kernels for few rows and against cuBLAS's for many."""
    configure_exact_blas()
    x, weight = randn(2048, depth), randn(features, depth, scale=0.05)
    scale, residual = randn(depth), randn(2048, features)
    normed = rms_norm(x, scale, EPS)
    added, gated = linear_add(x, weight, residual), linear_silu_mul(normed, weight)
    for rows in (1, 2, 5, 8, 9, 16):
        few = slice(0, rows)
        assert torch.equal(ready_linear_add(x[few], weight, residual[few]), added[few])
        assert torch.equal(norm_linear_silu_mul(x[few], (scale, EPS), weight), gated[few])
        assert torch.equal(linear_add(x[few], weight, residual[few]), added[few])
    for rows in (17, 64, 65, 333):
        assert torch.equal(rms_norm(x[:rows], scale, EPS), normed[:rows])
        assert torch.equal(linear_silu_mul(normed[:rows], weight), gated[:rows])


def small_model():
    config = config_from_json(SMOLLM2, source="a test")
    backend = select_backend(
        "auto", head_size=config.head_size, dtype=BF16, block_size=BLOCK, device="cuda"
    )
    return random_weights(config, std=0.05, device="cuda", attention_backend=backend)


def batch(context, query_len, table):
    def ints(*values):
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    positions = torch.arange(context, context + query_len, device="cuda")
    slots = table[0, positions // BLOCK].long() * BLOCK + positions % BLOCK
    metadata = AttentionMetadata(
        query_start_loc=ints(0, query_len),
        context_lens=ints(context),
        seq_lens=ints(context + query_len),
        block_table=table,
        slot_mapping=slots,
        max_query_len=query_len,
        uniform=True,
    )
    return positions, metadata


@pytest.mark.parametrize("query_len", [1, 5])
def test_a_captured_step_has_the_bits_of_a_plain_one(query_len, monkeypatch):
    """Replays whose inputs, lengths and blocks take turns: a value read too early would be that of
    the replay before. Against eager runs without early reads, by the kernels stood for."""
    model = small_model()
    width = 256
    cache = model.make_kv_cache(2 * width, BLOCK)
    cache.keys.normal_()
    cache.values.normal_()
    tables = torch.randperm(2 * width, device="cuda").int().view(2, 1, width)
    cases = []
    for turn, context in enumerate((1024, 3, 1019, 127, 128, 3900)):
        ids = torch.randint(0, 2048, (query_len,), device="cuda")
        cases.append((ids, *batch(context, query_len, tables[turn % 2])))

    saved = cache.keys.clone(), cache.values.clone()

    def restore():
        """What a case wrote would be another's context."""
        cache.keys.copy_(saved[0])
        cache.values.copy_(saved[1])

    def plain(ids, positions, metadata):
        restore()
        with monkeypatch.context() as patch:
            patch.setattr(ready_linear, "MAX_ROWS", 0)
            patch.setattr(attention_triton, "SMALL_HEADS", ())
            return model.forward(ids, positions, cache, metadata).clone()

    with torch.inference_mode():
        wanted = [plain(*case) for case in cases]
        ids, positions, metadata = batch_of = cases[0]
        ids, positions = ids.clone(), positions.clone()
        static = {
            name: getattr(metadata, name).clone()
            for name in ("context_lens", "seq_lens", "block_table", "slot_mapping")
        }
        held = AttentionMetadata(
            query_start_loc=metadata.query_start_loc,
            max_query_len=query_len,
            uniform=True,
            **static,
        )
        restore()
        assert torch.equal(model.forward(*batch_of[:2], cache, batch_of[2]), wanted[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            # As in a step: what a pass is made of is written by the graph's own first kernels.
            inputs = [each.clone() for each in (ids, positions, *static.values())]
            own = AttentionMetadata(
                query_start_loc=held.query_start_loc,
                max_query_len=query_len,
                uniform=True,
                **dict(zip(static, inputs[2:], strict=True)),
            )
            out = model.forward(inputs[0], inputs[1], cache, own)
        for _ in range(4):
            for case, expected in zip(cases, wanted, strict=True):
                restore()
                ids.copy_(case[0])
                positions.copy_(case[1])
                for name, tensor in static.items():
                    tensor.copy_(getattr(case[2], name))
                graph.replay()
                assert torch.equal(out, expected)


def test_these_kernels_are_used():
    model = small_model()
    x = randn(5, 576)
    layer = model.first_layers(1)[0]
    assert ready_linear.is_ready(x, [each.weight.shape[1] for _, each in layer.linears("")])
    assert not ready_linear.is_ready(randn(17, 576), [576])
    assert not ready_linear.is_ready(x, [4096])
