"""P4, P10 and exactness of engines with adapters on a real GPU."""

import pytest
from adapters import merged, write_adapter
from harness import PROMPTS, assert_decodes_replayed, assert_no_leak, greedy
from oracle import CLOSE_CALL, Oracle
from tiny import make_tiny

import specdec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("exact_and_poisoned"),
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_compiled_after_the_start(wide, monkeypatch, dtype):
    """Prompts of many lengths, alone and together, meet kernels compiled at start-up."""
    compiled = []

    def note(*, fn, **_):
        if "lora" in fn.module:
            compiled.append(fn.name)

    with gpu_engine(wide, dtype=dtype) as engine:
        monkeypatch.setattr("triton.knobs.runtime.jit_cache_hook", note)
        for length in (1, 3, 17, 40, 60, 64, 65, 90, 200):
            prompts = [[(5 * i + 3 * j) % 300 for j in range(length)] for i in range(len(NAMES))]
            engine.generate(prompts[0], greedy(2), lora=NAMES[0])
            engine.generate(prompts, greedy(6), lora=NAMES)
            engine.generate(prompts[:2], greedy(6), lora=NAMES[-2:])
        assert compiled == []
