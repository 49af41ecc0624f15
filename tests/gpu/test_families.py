"""Model families on a GPU: kernels of their own, logits, and P1 bit for bit in bfloat16."""

import pytest
import torch
import torch.nn.functional as F
from harness import PROMPTS, assert_decodes_replayed, assert_no_leak, greedy
from oracle import Oracle, expect, speculate
from paged import logits_of, relative_error
from tiny import blended, make_tiny

import specdec
from specdec.kernels import moe, moe_triton
from specdec.kernels.activation import gelu_tanh_mul, gelu_tanh_mul_reference
from specdec.kernels.head_linear import head_linear, head_linear_reference
from specdec.kernels.linear import configure_exact_blas, linear, linear_silu_mul
from specdec.kernels.norm import add_rms_norm, rms_norm, rms_norm_reference
from specdec.kernels.tuning import TileConfig
from specdec.verifier.attention.select import select_backend
from specdec.verifier.loading import load_model, read_config

pytestmark = pytest.mark.gpu

# Around the border between the two heights of tile, and up to several tiles of each expert.
ROW_COUNTS = [1, 2, 3, 5, 8, 15, 16, 17, 31, 40, 63, 64, 65, 66, 100, 128, 129, 200, 255, 333, 512]


@pytest.fixture(autouse=True)
def exact() -> None:
    configure_exact_blas()


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


class Experts:
    """A sparse layer: experts, features, features inside an expert, experts of a token."""

    def __init__(self, num: int, depth: int, width: int, top_k: int, dtype=torch.bfloat16) -> None:
        self.gate_up = randn(num, 2 * width, depth, seed=1, dtype=dtype) / depth**0.5
        self.down = randn(num, depth, width, seed=2, dtype=dtype) / width**0.5
        self.x = randn(512, depth, seed=3, dtype=dtype)
        # Skewed, so that some experts have many rows and some none.
        logits = randn(512, num, seed=4, dtype=torch.float32) + torch.linspace(
            -2, 2, num, device="cuda"
        )
        self.ids, weights = moe.route_experts(logits, None, top_k, False, True, 1.0, 1, 1)
        self.weights = weights.to(dtype)

    def run(self, rows: slice, config: TileConfig | None = None) -> torch.Tensor:
        parts = (self.x[rows], self.gate_up, self.down, self.ids[rows], self.weights[rows])
        return moe_triton.apply_experts(*parts, config=config)


@pytest.fixture(scope="module", params=[(8, 1024, 896, 2), (64, 512, 384, 6)], ids=str)
def experts(request) -> Experts:
    return Experts(*request.param)


def test_expert_rows_do_not_depend_on_their_number(experts) -> None:
    """P3, bit for bit, at both ends of the batch: across tiles and heights of tile."""
    every_row = experts.run(slice(0, 512))
    for count in ROW_COUNTS:
        for rows in (slice(0, count), slice(512 - count, 512)):
            assert torch.equal(experts.run(rows), every_row[rows]), rows


def test_experts_equal_separate_layers(experts) -> None:
    """Bit for bit the fused gate and up projection and the down projection of each pair alone."""
    rows = 20
    pairs = [
        linear(linear_silu_mul(experts.x[row : row + 1], experts.gate_up[e]), experts.down[e])
        for row in range(rows)
        for e in experts.ids[row].tolist()
    ]
    for weights in (experts.weights[:rows], experts.weights[:rows].float()):
        wanted = moe.combine_experts_reference(torch.cat(pairs), weights)
        parts = (experts.gate_up, experts.down, experts.ids[:rows], weights)
        assert torch.equal(moe.apply_experts(experts.x[:rows], *parts), wanted)


def test_bits_of_experts_do_not_depend_on_the_tile(experts) -> None:
    for rows in (slice(0, 5), slice(0, 200)):
        wanted = experts.run(rows)
        for block_n, block_k, stages, swap in (
            *((16, 64, 4, False), (32, 128, 3, False), (64, 64, 3, False), (64, 64, 2, True)),
        ):
            config = TileConfig(block_n=block_n, block_k=block_k, stages=stages, swap=swap)
            assert torch.equal(experts.run(rows, config), wanted), config


def test_float32_experts_are_accurate() -> None:
    experts = Experts(8, 256, 192, 2, dtype=torch.float32)
    own = moe.apply_experts_reference(
        *(t.double() for t in (experts.x, experts.gate_up, experts.down)),
        experts.ids,
        experts.weights.double(),
    )
    result = experts.run(slice(0, 512))
    # Two sums in order, each of at most 256 additions, off by up to 2^-23 of the sum so far.
    assert _error(result, own) < 2 * 256**0.5 * 2**-23


@pytest.mark.parametrize(
    "routing",
    [
        (8, 2, False, True, 1.0, 1, 1),
        (128, 8, False, True, 1.0, 1, 1),
        (160, 6, False, False, 16.0, 8, 3),
        (256, 8, True, True, 2.5, 8, 4),
    ],
    ids=str,
)
def test_routing(routing) -> None:
    num_experts, top_k, sigmoid, *rest = routing
    logits = randn(512, num_experts, dtype=torch.float32)
    logits[7], logits[9] = 0.0, torch.nan
    bias = randn(num_experts, dtype=torch.float32, seed=1) / 8 if sigmoid else None
    ids, weights = moe.route_experts(logits, bias, top_k, sigmoid, *rest)
    cpu_bias = None if bias is None else bias.cpu()
    own_ids, own = moe.route_experts_reference(logits.cpu(), cpu_bias, top_k, sigmoid, *rest)
    # Scores that rounding can put in another order are as rare as ties among floats.
    same = (ids.cpu() == own_ids).all(dim=1)
    assert same.float().mean() > 0.99
    assert same[7] or sigmoid
    assert ((ids >= 0) & (ids < num_experts)).all()
    assert weights[9].isnan().all()
    keep = same & own.isfinite().all(dim=1)
    torch.testing.assert_close(weights.cpu()[keep], own[keep], rtol=1e-5, atol=1e-6)
    for count in ROW_COUNTS:
        some_ids, some = moe.route_experts(logits[-count:], bias, top_k, sigmoid, *rest)
        assert torch.equal(some_ids, ids[-count:])
        assert torch.equal(some.nan_to_num(9.0), weights[-count:].nan_to_num(9.0))


@pytest.mark.parametrize(
    ("depth", "features", "transposed"), [(128, 512, False), (512, 128, True), (75, 133, False)]
)
def test_layers_of_each_head(depth, features, transposed) -> None:
    """Accurate, and bit for bit the same for any number of rows."""
    x = randn(512, 8, depth + 64)[..., :depth]
    weight = randn(8, features, depth, seed=1).transpose(1, 2) / depth**0.5
    weight = weight if transposed else weight.contiguous()
    every_row = head_linear(x, weight)
    exact = torch.einsum("thk,hkn->thn", x.double(), weight.double())
    own = head_linear_reference(x, weight)
    assert _error(every_row, exact) <= 2 * _error(own, exact)
    for count in ROW_COUNTS:
        assert torch.equal(head_linear(x[-count:], weight), every_row[-count:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_norms_of_one_plus_the_weight(dtype) -> None:
    x, residual = randn(512, 1152, dtype=dtype), randn(512, 1152, dtype=dtype, seed=1)
    settings = (randn(1152, dtype=dtype, seed=2), 1e-6, True)
    every_row = rms_norm(x, *settings)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    exact = exact * (1 + settings[0].double())
    own = rms_norm_reference(x, *settings)
    assert _error(every_row, exact) <= 2 * _error(own, exact) + 1e-12
    normed, new_residual = add_rms_norm(x, residual, *settings)
    assert torch.equal(new_residual, x + residual)
    assert torch.equal(normed, rms_norm(new_residual, *settings))
    for count in ROW_COUNTS:
        assert torch.equal(rms_norm(x[-count:], *settings), every_row[-count:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gelu_tanh_mul(dtype) -> None:
    gate_up = 3 * randn(64, 2 * 1111, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    exact = F.gelu(gate, approximate="tanh") * up
    own = gelu_tanh_mul_reference(gate_up)
    assert _error(gelu_tanh_mul(gate_up), exact) <= 2 * _error(own, exact) + 1e-12
    assert torch.equal(gelu_tanh_mul(gate_up)[3:5], gelu_tanh_mul(gate_up[3:5]))


def _error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return ((result.double() - exact).norm() / exact.norm()).item()


# Real tiles: widths of several, head sizes of real models.
SHAPE = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 512, "vocab": 512}
GEMMA = SHAPE | {"head_dim": 256, "kv_heads": 1, "query_pre_attn_scalar": 256, "layers": 3}
LATENT = {
    "kv_lora_rank": 128,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "n_shared_experts": 1,
}
MODELS = {
    "mistral": SHAPE | {"sliding_window": 24},
    "mixtral": SHAPE | {"num_local_experts": 8},
    "qwen2_moe": SHAPE
    | {"num_experts": 60, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 256},
    "qwen3_moe": SHAPE | {"num_experts": 32, "num_experts_per_tok": 8, "layers": 3},
    "deepseek_v2": SHAPE | LATENT | {"topk_method": "greedy", "q_lora_rank": None},
    "deepseek_v3": SHAPE | LATENT | {"n_group": 4, "topk_group": 2},
    "gemma2": GEMMA
    | {"sliding_window": 24, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": GEMMA | {"sliding_window": 24, "rope_local_base_freq": 1e4},
    "bamba": SHAPE | {"layers": 3, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1},
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory) -> str:
    root = tmp_path_factory.mktemp(request.param)
    # Wide layers with a deviation of 0.25 would leave one token without a rival.
    return str(
        make_tiny(root / "target", family=request.param, seed=5, std=0.1, **MODELS[request.param])
    )


def gpu_logits(folder: str, ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    config = read_config(folder)
    backend = select_backend(
        "auto",
        head_size=config.head_size,
        dtype=dtype,
        block_size=4,
        device="cuda",
        sliding_window=config.sliding_window,
        soft_cap=config.attention_soft_cap,
        latent_size=config.latent_size,
    )
    model = load_model(folder, dtype=dtype, device="cuda", attention_backend=backend)
    return logits_of(model, ids, chunks=[len(ids) - 30, 1, 29]).cpu()


def test_logits(folder) -> None:
    """Float32 as the reference; bfloat16 at most twice as far from it as transformers' own.

    By the median row: where rounding changes an expert, a row is another one on both sides.
    """
    from transformers import AutoModelForCausalLM

    ids = torch.randint(512, (70,), generator=torch.Generator().manual_seed(0)).tolist()
    oracle = Oracle(folder)
    exact = oracle.logits(ids)
    assert relative_error(gpu_logits(folder, ids, torch.float32), exact) < 1e-4
    attention = {"attn_implementation": oracle.model.config._attn_implementation}
    oracle.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **attention)

    def median_error(logits: torch.Tensor) -> float:
        return float(((logits - exact).norm(dim=1) / exact.norm(dim=1)).median())

    ours, theirs = gpu_logits(folder, ids, torch.bfloat16), oracle.logits(ids)
    assert median_error(ours) <= 2 * median_error(theirs)


@pytest.fixture(scope="module")
def draft(folder, tmp_path_factory) -> str:
    return str(blended(folder, tmp_path_factory.mktemp("draft"), 0.05))


def gpu_engine(model: str, draft: str | None, k: int, **options):
    defaults = {
        "device": "cuda",
        "dtype": "bfloat16",
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "uniform_request_counts": [1, 5],
        "max_num_seqs": 5,
        "max_model_len": 256,
        "num_kv_blocks": 128,
        "enable_prefix_caching": False,
    }
    return specdec.Engine(model, draft, k, **(defaults | options))


def test_text_is_the_solo_text_bit_for_bit(folder, draft) -> None:
    """P1 and P3 in bfloat16: with every drafter, in a batch, in chunks, greedy and seeded."""
    params = [greedy(80), greedy(80, temperature=0.8, seed=3, top_p=0.95)]
    with gpu_engine(folder, None, 0) as engine:
        solo = [[engine.generate(p, each).token_ids for p in PROMPTS] for each in params]
    for name, k, options in (
        (draft, 4, {}),
        (draft, 2, {"max_num_batched_tokens": 25}),
        ("ngram", 4, {}),
        ("layer_skip:1", 3, {}),
    ):
        with gpu_engine(folder, name, k, **options) as engine:
            for each, texts in zip(params, solo, strict=True):
                outs = engine.generate(PROMPTS, each)
                assert [out.token_ids for out in outs] == texts, (name, k)
            if name == draft:
                drafted = sum(out.stats.drafted for out in outs)
                assert 0 < sum(out.stats.accepted for out in outs) < drafted
            assert_decodes_replayed(engine)
            assert_no_leak(engine)


def test_counts_do_not_depend_on_graphs(folder, draft) -> None:
    """P4: a stale draft KV changes no token, only how many are accepted."""
    counts = []
    for mode in ("FULL_DECODE_ONLY", "NONE"):
        with gpu_engine(folder, draft, 4, cudagraph_mode=mode) as engine:
            outs = engine.generate(PROMPTS, greedy(60))
            counts.append([(out.token_ids, out.stats.accepted_per_step) for out in outs])
    assert counts[0] == counts[1]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2"])
def test_transformers_implementation(tmp_path, family) -> None:
    """Float32 text and counts on FULL graphs are the oracle's, as those of our own models."""
    target = str(make_tiny(tmp_path / "target", family=family, seed=5))
    proposal = str(blended(target, tmp_path / "draft", 0.1))
    options = {"dtype": "float32", "model_impl": "transformers"}
    with gpu_engine(target, proposal, 4, **options) as engine:
        outs = engine.generate(PROMPTS, greedy(24))
        assert_decodes_replayed(engine)
    reference, proposer = Oracle(target), Oracle(proposal)
    for prompt, out in zip(PROMPTS, outs, strict=True):
        expect(out, speculate(reference, proposer, prompt, k=4, max_new_tokens=24))
