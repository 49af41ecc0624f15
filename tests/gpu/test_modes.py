"""The five modes on a real GPU: one text, replays as promised, and nothing compiled after start."""

import re

import pytest
from compilations import forget_compiled_kernels, noted_compilations
from harness import PROMPTS, greedy
from tiny import blended, make_tiny

import specdec
from specdec.verifier.modes import CUDAGraphMode

pytestmark = pytest.mark.gpu

MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
# What a batch of decode rows, and one with prompts in it, runs as.
SERVED = {
    "NONE": ("NONE", "NONE"),
    "PIECEWISE": ("PIECEWISE", "PIECEWISE"),
    "FULL": ("FULL", "FULL"),
    "FULL_DECODE_ONLY": ("FULL", "NONE"),
    "FULL_AND_PIECEWISE": ("FULL", "PIECEWISE"),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Head size 64, a group of three, four layers: three distinct pieces, real tiles."""
    root = tmp_path_factory.mktemp("modes")
    shape = {"hidden": 192, "heads": 3, "kv_heads": 1, "head_dim": 64, "ffn": 320, "vocab": 300}
    target = make_tiny(root / "target", seed=3, std=0.15, layers=4, max_position=512, **shape)
    return str(target), str(blended(target, root / "blend", 0.1))


def gpu_engine(pair, k=4, draft="model", **options):
    defaults = {
        "device": "cuda",
        "dtype": "bfloat16",
        "max_num_seqs": 8,
        "max_model_len": 320,
        "num_kv_blocks": 512,
    }
    chosen = pair[1] if draft == "model" else draft
    return specdec.Engine(pair[0], chosen, k, **(defaults | options))


def traffic(engine, params=None):
    """Prompts of 16, of 1 + k and of 200 tokens that arrive while others decode."""
    source = [(37 * i + i * i) % 300 for i in range(200)]
    prompts = [source[:16], source[:5], PROMPTS[3], source, PROMPTS[1], source[7:40]]
    texts = [[] for _ in prompts]
    streams = []
    for i, prompt in enumerate(prompts):
        streams.append(engine.stream(prompt, params or greedy(24)))
        for j, stream in enumerate(streams[: i + 1]):
            event = next(stream, None)
            texts[j] += event.token_ids if event else []
    for i, stream in enumerate(streams):
        texts[i] += [token for event in stream for token in event.token_ids]
    return texts


def check_records(engine, mode):
    decode, mixed = SERVED[mode]
    records = engine.recent_steps(10_000)
    kinds = set()
    for record in records:
        with_prompts = "prefill" in (record.reason or "") or (
            record.mode == "FULL" and not record.descriptor.uniform
        )
        kinds.add(with_prompts)
        assert record.mode == (mixed if with_prompts else decode), record
    assert kinds == {True, False}
    flat = [r for r in engine.graph_table() if not r.descriptor.uniform]
    whole = [r for r in engine.graph_table() if r.descriptor.uniform and r.role == "step"]
    assert sum(r.replays for r in flat) == sum(
        r.mode != "NONE" and not r.descriptor.uniform for r in records
    )
    assert sum(r.replays for r in whole) == sum(r.descriptor.uniform for r in records) * (
        decode == "FULL"
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("draft", ["model", "ngram", None])
def test_five_modes_one_text(pair, draft, dtype):
    """Bit for bit: one set of kernels serves every mode, so even bfloat16 texts are equal."""
    texts = {}
    for mode in MODES:
        with gpu_engine(pair, draft=draft, dtype=dtype, cudagraph_mode=mode, debug=True) as engine:
            texts[mode] = traffic(engine)
            check_records(engine, mode)
    for mode, text in texts.items():
        assert text == texts["NONE"], mode


def test_five_modes_one_sampled_text(pair):
    params = greedy(24, temperature=0.9, seed=7, top_p=0.95)
    texts = []
    for mode in MODES:
        with gpu_engine(pair, cudagraph_mode=mode) as engine:
            texts.append(traffic(engine, params))
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_pieces_give_the_same_text(pair, backend, tmp_path):
    config = {"mode": 3, "backend": backend, "cache_dir": str(tmp_path)}
    with gpu_engine(pair, cudagraph_mode="NONE") as engine:
        expected = traffic(engine)
    for mode in ("FULL_AND_PIECEWISE", "NONE", "FULL"):
        with gpu_engine(pair, cudagraph_mode=mode, compilation_config=config) as engine:
            assert traffic(engine) == expected, mode
            check_records(engine, mode)


def test_partitions_of_inductor_give_the_same_text(pair, tmp_path):
    """A partition before, between and after the layers' attention, and nothing compiled twice."""
    from specdec.verifier import inductor

    config = {"use_inductor_graph_partition": True, "cache_dir": str(tmp_path)}
    with gpu_engine(pair, cudagraph_mode="NONE") as engine:
        expected = traffic(engine)
    before = inductor.counts["compiled"]
    for mode in ("FULL_AND_PIECEWISE", "PIECEWISE", "FULL", "NONE"):
        with gpu_engine(pair, cudagraph_mode=mode, compilation_config=config, debug=True) as engine:
            assert traffic(engine) == expected, mode
            check_records(engine, mode)
            assert engine._runner._graphs.flat.num_pieces == 5
    assert inductor.counts["compiled"] == before + 1


def test_static_sizes_give_the_same_text(pair, tmp_path):
    config = {"compile_sizes": [8, 16, 64], "cache_dir": str(tmp_path)}
    with gpu_engine(pair, cudagraph_mode="NONE") as engine:
        expected = traffic(engine)
    with gpu_engine(pair, compilation_config=config) as engine:
        assert traffic(engine) == expected


def test_verified_graphs_have_no_error(pair):
    """A graph's first replay against eager, on live state: tokens, state and hidden states."""
    for mode in ("FULL_AND_PIECEWISE", "FULL"):
        with gpu_engine(pair, cudagraph_mode=mode, verify_graphs=True) as engine:
            traffic(engine)
            used = [row for row in engine.graph_table() if row.replays]
            assert {row.mode for row in used} == set(SERVED[mode])
            assert {row.max_error for row in used} == {0.0}


@pytest.fixture
def compilations():
    with noted_compilations() as names:
        yield names


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("draft", ["model", "ngram"])
def test_nothing_is_compiled_after_start_up(pair, mode, draft, compilations):
    """Mixed greedy traffic with first chunks of 16 tokens, of every number of requests."""
    # Other tests of this process have compiled the same kernels: start with none.
    forget_compiled_kernels()
    with gpu_engine(pair, cudagraph_mode=mode, draft=draft) as engine:
        at_start = len(compilations)
        assert at_start > 0
        traffic(engine)
        for num_reqs in range(1, 9):
            prompts = [[(7 * i + j) % 300 for j in range(16)] for i in range(num_reqs)]
            engine.generate(prompts, greedy(7))
        assert compilations[at_start:] == []


def test_inductor_compiles_nothing_after_start_up(pair, tmp_path):
    from torch._dynamo.utils import counters

    config = {"mode": 3, "backend": "inductor", "cache_dir": str(tmp_path)}
    with gpu_engine(pair, compilation_config=config) as engine:
        before = {name: dict(values) for name, values in counters.items()}
        traffic(engine)
        assert {name: dict(values) for name, values in counters.items()} == before


def test_a_compiled_folder_is_used_again(pair, tmp_path):
    from specdec.verifier import inductor

    config = {"mode": 3, "backend": "inductor", "cache_dir": str(tmp_path)}
    with gpu_engine(pair, compilation_config=config) as engine:
        expected = traffic(engine)
    before = inductor.counts["compiled"]
    with gpu_engine(pair, compilation_config=config) as engine:
        assert inductor.counts["compiled"] == before
        assert traffic(engine) == expected


def test_a_memory_limit_is_kept(pair):
    options = {"max_num_seqs": 64, "steps_per_replay": 1}
    with pytest.raises(ValueError, match="graph_memory_limit") as refusal:
        gpu_engine(pair, graph_memory_limit=1, **options)
    # The driver hands out graphs' memory in pieces of 2 MiB, and not the same number every time.
    least = int(re.search(r"largest graphs alone take (\d+)", str(refusal.value))[1])
    limit = least + (4 << 20)
    with gpu_engine(pair, graph_memory_limit=limit, **options) as engine:
        table = engine.graph_table()
        assert sum(row.num_bytes for row in table) <= limit
        engine.generate([PROMPTS[0]] * 64, greedy(8))
        assert engine.recent_steps(1)[0].mode == "FULL"
    with gpu_engine(pair, **options) as engine:
        assert len(table) <= len(engine.graph_table())


def test_no_rounds_by_themselves_under_a_memory_limit(pair):
    with gpu_engine(pair, graph_memory_limit=1 << 30) as engine:
        assert all(row.rounds == 1 for row in engine.graph_table())
        assert sum(row.num_bytes for row in engine.graph_table()) <= 1 << 30


def test_the_sdpa_backend_is_served_what_it_can(pair, caplog):
    """FULL for every batch needs ALWAYS: PIECEWISE for prompts, and one warning."""
    with gpu_engine(pair, cudagraph_mode="FULL", attention_backend="sdpa") as engine:
        traffic(engine)
        check_records(engine, "FULL_AND_PIECEWISE")
    served = [r for r in caplog.records if "is served" in r.getMessage()]
    assert len(served) == 1 and str(CUDAGraphMode.FULL_AND_PIECEWISE) in served[0].getMessage()
