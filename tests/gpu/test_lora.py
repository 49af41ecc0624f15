"""P4, P10 and exactness with adapters on a real GPU."""

import pytest
import torch
from adapters import merged, write_adapter
from harness import PROMPTS, assert_decodes_replayed, assert_no_leak, greedy
from oracle import CLOSE_CALL, Oracle
from tiny import make_tiny

import specdec
from specdec.kernels import linear_triton, lora
from specdec.kernels.activation import silu_mul
from specdec.kernels.linear import configure_exact_blas, linear, linear_silu_mul

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

FORMS = [
    {"r": 8},
    {"r": 16, "lora_alpha": 16, "use_rslora": True},
    {"r": 3, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    {"r": 64, "lora_alpha": 64},
    {"r": 4, "rank_pattern": {"up_proj": 2}},
    {"r": 1, "target_modules": ["gate_proj"]},
    {"r": 24, "lora_alpha": 24},
    {"r": 8, "target_modules": ["k_proj", "o_proj", "up_proj"]},
]
SHAPES = [((4096, 1024, 1024), 4096), ((4096,), 14336), ((576, 192, 192), 576), ((63,), 75)]
ROW_COUNTS = [1, 5, 15, 16, 17, 40, 63, 64, 65, 80, 320, 511, 512, 513, 1024, 2048]


@pytest.fixture(autouse=True)
def exact_and_poisoned():
    """cuBLASLt without split-K, and NaN in all memory that PyTorch hands out unwritten."""
    configure_exact_blas()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def randn(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def stacks(num_slots, rank, depth, parts, dtype=torch.bfloat16):
    """The last slot is NaN: no row may read it."""
    a = randn(num_slots, len(parts) * rank, depth, dtype=dtype, seed=1) / depth**0.5
    b = randn(num_slots, sum(parts), rank, dtype=dtype, seed=2) / rank**0.5
    a[-1] = b[-1] = torch.nan
    return a, b


def slots_of(num_rows, num_adapters):
    """Requests of five rows; one in four is a base row's."""
    requests = torch.arange(num_rows, device="cuda") // 5
    return torch.where(requests % 4 == 3, -1, requests % num_adapters)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rank", [8, 16, 64])
@pytest.mark.parametrize(("parts", "depth"), SHAPES)
def test_delta_is_as_good_as_pytorchs(parts, depth, rank, dtype):
    """Error against float64 at most twice that of a gather and two products in the same dtype.

    In float32, where PyTorch's products do not add in order, at most that of two sums in order:
    ``depth`` and ``rank`` additions, each off by up to 2^-23 of the sum so far, either way.
    """
    a, b = stacks(5, rank, depth, parts, dtype)
    for num_rows in (5, 80, 600):
        x, slots = randn(num_rows, depth, dtype=dtype, seed=3), slots_of(num_rows, 4)
        out = torch.zeros(num_rows, sum(parts), dtype=dtype, device="cuda")
        result = lora.lora_delta_(out.clone(), x, a, b, slots, parts).double()
        plain = lora.lora_delta_reference(out.clone(), x, a, b, slots, parts).double()
        wide = (t.double() for t in (out, x, a, b))
        exact = lora.lora_delta_reference(*wide, slots, parts)
        assert result.isfinite().all()
        norm = exact.norm()
        bound = 2 * (plain - exact).norm() / norm + 1e-12
        if dtype == torch.float32:
            bound = (depth**0.5 + rank**0.5) * 2**-23
        assert (result - exact).norm() / norm <= bound
        assert not result[slots < 0].any()


@pytest.mark.parametrize("rank", [8, 16, 64])
@pytest.mark.parametrize(("parts", "depth"), SHAPES)
def test_rows_have_the_same_bits_in_every_batch(parts, depth, rank):
    """Any number of rows, fused with the product or after it; base rows have the layer's bits."""
    a, b = stacks(5, rank, depth, parts)
    x, weight = randn(2048, depth, seed=3), randn(sum(parts), depth, seed=4)
    slots = slots_of(2048, 4)
    product = linear(x, weight)
    wanted = lora.lora_delta_(product.clone(), x, a, b, slots, parts)
    base = slots < 0
    assert torch.equal(wanted[base], product[base])
    assert (wanted[~base] != product[~base]).any(1).all()
    for num_rows in ROW_COUNTS:
        rows = slice(0, num_rows)
        result = lora.lora_linear(x[rows], weight, None, a, b, slots[rows], parts)
        assert torch.equal(result, wanted[rows]), num_rows
        # The same rows further back, beside others.
        rows = slice(2048 - num_rows, 2048)
        result = lora.lora_linear(x[rows], weight, None, a, b, slots[rows], parts)
        assert torch.equal(result, wanted[rows]), num_rows


@pytest.mark.parametrize("rank", [8, 64])
@pytest.mark.parametrize(("features", "depth"), [(14336, 4096), (1536, 576), (63, 75)])
def test_gate_and_up_have_the_bits_of_separate_steps(features, depth, rank):
    parts = (features, features)
    a, b = stacks(5, rank, depth, parts)
    x, weight = randn(600, depth, seed=3), randn(2 * features, depth, seed=4) / depth**0.5
    slots = slots_of(600, 4)
    gate_up = lora.lora_delta_(linear(x, weight), x, a, b, slots, parts)
    wanted, base = silu_mul(gate_up), linear_silu_mul(x, weight)
    for num_rows in (1, 5, 17, 40, 64, 65, 320, 513, 600):
        rows = slice(0, num_rows)
        result = lora.lora_linear_silu_mul(x[rows], weight, a, b, slots[rows])
        assert torch.equal(result, wanted[rows]), num_rows
        own = slots[rows] < 0
        assert torch.equal(result[own], base[rows][own])


def test_embedding_rows():
    a, b = randn(4, 300, 8, seed=1), randn(4, 200, 8, seed=2)
    ids = torch.arange(40, device="cuda") * 7 % 300
    slots, out = slots_of(40, 4), randn(40, 200, seed=3)
    wanted = lora.lora_embedding_reference(out.clone(), ids, a, b, slots)
    result = lora.lora_embedding_(out.clone(), ids, a, b, slots)
    torch.testing.assert_close(result, wanted, rtol=2e-2, atol=2e-2)
    assert torch.equal(result[slots < 0], out[slots < 0])


def test_both_families_of_products_are_met():
    """The row counts above lie on both sides of the border between Triton and cuBLASLt."""
    assert 5 < linear_triton.MAX_SKINNY_ROWS < 320


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model with real tiles, and eight adapters of different forms."""
    root = tmp_path_factory.mktemp("wide")
    shape = {"hidden": 192, "heads": 3, "kv_heads": 1, "head_dim": 64, "ffn": 320, "vocab": 300}
    target = make_tiny(root / "target", seed=3, std=0.15, **shape)
    paths = {
        f"a{i}": write_adapter(root / f"a{i}", target, seed=i, std=0.08, **form)
        for i, form in enumerate(FORMS)
    }
    return str(target), paths


def gpu_engine(wide, draft="ngram", k=4, **options):
    target, paths = wide
    defaults = {
        "device": "cuda",
        "dtype": "float32",
        "max_num_seqs": 12,
        "max_model_len": 256,
        "num_kv_blocks": 512,
        "lora": paths,
    }
    draft = target if draft == "same" else draft
    return specdec.Engine(target, draft, k, **(defaults | options))


NAMES = [*(f"a{i}" for i in range(8)), None, "a0", None]
TEXTS = [[token for token in PROMPTS[i % 5]] for i in range(len(NAMES))]


@pytest.mark.parametrize("draft", ["same", "ngram", "layer_skip:1"])
def test_eight_adapters_and_the_base_at_k_4(wide, draft):
    """Every row is its merged model's text, in float32, on graphs."""
    target, paths = wide
    with gpu_engine(wide, draft) as engine:
        outs = engine.generate(TEXTS, greedy(32), lora=NAMES)
        assert_decodes_replayed(engine)
        assert_no_leak(engine)
        engine.check_integrity()
    oracles = {name: merged(target, path) for name, path in paths.items()}
    oracles[None] = Oracle(target)
    for name, prompt, out in zip(NAMES, TEXTS, outs, strict=True):
        text = oracles[name].greedy(prompt, 32)[0]
        _, margins = oracles[name].choices([*prompt, *text])
        close = [margin < CLOSE_CALL for margin in margins[len(prompt) - 1 :]]
        certain = (*close[:32], True).index(True)
        assert out.token_ids[:certain] == text[:certain], name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("draft", ["same", "ngram", "layer_skip:1"])
def test_graph_equals_eager_and_no_draft(wide, draft, dtype):
    """P4 and P1, seeded samples too: the same texts from graphs, without, and without a drafter."""
    texts = []
    params = [greedy(40, temperature=(i % 2) * 0.8, seed=i) for i in range(len(NAMES))]
    for options in ({}, {"cudagraph_mode": "NONE"}, {"draft": None, "k": 0}):
        with gpu_engine(wide, **({"draft": draft, "dtype": dtype} | options)) as engine:
            outs = engine.generate(TEXTS, params, lora=NAMES)
            texts.append([out.token_ids for out in outs])
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("draft", ["same", "ngram"])
def test_base_rows_have_the_bits_of_the_base_graph(wide, draft):
    """bfloat16: log-probabilities of a base row beside adapters and without them, to the bit."""
    params = greedy(24, logprobs=5)
    with gpu_engine(wide, draft, dtype="bfloat16") as engine:
        alone = engine.generate(TEXTS[:3], params)
        assert not engine.recent_steps(1)[0].descriptor.has_lora
        beside = engine.generate(TEXTS, params, lora=[None] * 3 + NAMES[:8])[:3]
        assert engine.recent_steps(1)[0].descriptor.has_lora
        solo = [engine.generate(TEXTS[3 + i], params, lora=NAMES[i]) for i in range(8)]
        mixed = engine.generate(TEXTS, params, lora=[None] * 3 + NAMES[:8])[3:]
    for one, other in zip([*alone, *solo], [*beside, *mixed], strict=True):
        assert one.token_ids == other.token_ids
        assert [each.top for each in one.logprobs] == [each.top for each in other.logprobs]


def test_adapters_swap_in_and_out_without_capture(wide):
    """More adapters than slots; then a removal, and another adapter in the slot it had."""
    _, paths = wide
    with gpu_engine(wide) as engine:
        expected = {
            name: engine.generate(TEXTS[0], greedy(16), lora=name).token_ids for name in paths
        }
    with gpu_engine(wide, max_loras=2) as engine:
        table = [(r.role, r.descriptor) for r in engine.graph_table() if r.descriptor.uniform]
        names = list(paths) * 3
        outs = engine.generate([TEXTS[0]] * len(names), greedy(16), lora=names)
        assert [out.token_ids for out in outs] == [expected[name] for name in names]
        engine.remove_lora("a0")
        engine.add_lora("other", paths["a1"])
        assert engine.generate(TEXTS[0], greedy(16), lora="other").token_ids == expected["a1"]
        after = [(r.role, r.descriptor) for r in engine.graph_table() if r.descriptor.uniform]
        assert after == table
        assert_no_leak(engine)
        engine.check_integrity()


def uniform_keys(engine):
    """Graphs of one round: those of several are captured when they are first worth it."""
    rows = [row for row in engine.graph_table() if row.descriptor.uniform and row.rounds == 1]
    return [(row.role, row.descriptor) for row in rows]


def test_a_hundred_adapters_take_turns_in_eight_slots(wide, tmp_path):
    """No recapture, and every adapter has its own text each time that it comes back."""
    target, _ = wide
    paths = {
        f"n{i}": write_adapter(tmp_path / f"n{i}", target, seed=100 + i, std=0.08, r=1 + i % 16)
        for i in range(100)
    }
    with gpu_engine(wide, lora=paths, max_loras=8) as engine:
        table = uniform_keys(engine)
        names = [*paths, *reversed(paths)]
        outs = engine.generate([TEXTS[0]] * len(names), greedy(12), lora=names)
        texts = [out.token_ids for out in outs]
        assert texts[:100] == texts[:99:-1]
        assert len({tuple(ids) for ids in texts}) > 90
        alone = [engine.generate(TEXTS[0], greedy(12), lora=name).token_ids for name in paths]
        assert alone == texts[:100]
        assert uniform_keys(engine) == table
        assert_decodes_replayed(engine)
        assert_no_leak(engine)
        engine.check_integrity()


SERVED = {
    "NONE": ("NONE", "NONE"),
    "PIECEWISE": ("PIECEWISE", "PIECEWISE"),
    "FULL": ("FULL", "FULL"),
    "FULL_DECODE_ONLY": ("FULL", "NONE"),
    "FULL_AND_PIECEWISE": ("FULL", "PIECEWISE"),
}


def arriving(engine):
    """Texts of the requests of NAMES, each of which comes while those before it decode."""
    groups = []
    for prompt, name in zip(TEXTS, NAMES, strict=True):
        groups.append(engine.add_request([*prompt, *prompt], greedy(24), name))
        engine.step()
    while any(group[0].finish_reason is None for group in groups):
        engine.step()
    return [engine.generation(group).token_ids for group in groups]


@pytest.mark.parametrize("backend", [None, "eager", "inductor", "partitions"])
def test_batches_with_prompts_and_adapters_run_as_their_mode_promises(wide, backend, tmp_path):
    """bfloat16: the same bits from pieces, whole graphs and none, static addresses checked.

    Pieces as they are traced, compiled, and cut by Inductor.
    """
    config = {"mode": 3, "backend": backend, "cache_dir": str(tmp_path)} if backend else None
    if backend == "partitions":
        config |= {"backend": "inductor", "use_inductor_graph_partition": True}
    options = {"dtype": "bfloat16", "debug": True, "cudagraph_capture_sizes": [12, 24, 60, 128]}
    with gpu_engine(wide, "same", cudagraph_mode="NONE", **options) as engine:
        expected = arriving(engine)
    for mode, (decode, mixed) in SERVED.items():
        with gpu_engine(
            wide, "same", cudagraph_mode=mode, compilation_config=config, **options
        ) as engine:
            assert arriving(engine) == expected, mode
            records = engine.recent_steps(1000)
            prompts = [r for r in records if r.num_tokens != r.num_reqs * (1 + r.k)]
            assert {r.mode for r in prompts} == {mixed}
            assert {r.mode for r in records if r not in prompts} == {decode}
            assert any(r.descriptor.has_lora for r in prompts)
            table = {
                (row.mode, row.descriptor.num_tokens)
                for row in engine.graph_table()
                if row.descriptor.has_lora and not row.descriptor.uniform
            }
            sizes = [12, 24, 60, 128] if mixed != "NONE" else []
            assert table == {(mixed, size) for size in sizes}
            assert_no_leak(engine)


def test_verified_graphs_of_prompts_with_adapters_have_no_error(wide):
    """Each graph's first replay against eager, on live state."""
    for mode in ("FULL", "PIECEWISE"):
        with gpu_engine(
            wide,
            dtype="bfloat16",
            cudagraph_mode=mode,
            verify_graphs=True,
            cudagraph_capture_sizes=[12, 60, 128],
        ) as engine:
            arriving(engine)
            used = [row for row in engine.graph_table() if row.replays]
            assert {row.max_error for row in used} == {0.0}
            assert any(r.descriptor.has_lora and not r.descriptor.uniform for r in used)


def test_nothing_is_compiled_after_the_start(wide, monkeypatch):
    """Prompts of many lengths with adapters meet kernels that were compiled at start-up."""
    compiled = []

    def note(*, fn, **_):
        if "lora" in fn.module:
            compiled.append(fn.name)

    with gpu_engine(wide) as engine:
        monkeypatch.setattr("triton.knobs.runtime.jit_cache_hook", note)
        for length in (1, 3, 17, 40, 90, 200):
            prompts = [[(5 * i + 3 * j) % 300 for j in range(length)] for i in range(len(NAMES))]
            engine.generate(prompts, greedy(6), lora=NAMES)
        assert compiled == []
