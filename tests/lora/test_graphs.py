"""P4, P10 and C42: graphs with adapters beside graphs without, in every order of use and capture.

On the CPU the graphs are recordings, which freeze what a CUDA capture freezes.
"""

import itertools

import pytest
import torch
from adapters import adapter_tensors, write_adapter
from harness import PROMPTS, assert_decodes_replayed, assert_no_leak, cpu_engine, greedy
from oracle import Oracle, expect

DRAFTS = ["blend.1", "ngram", "layer_skip:1", None]
ORDER = [[None, None], ["a", "a"], ["b", "b"], ["a", "b"], [None, None], ["b", None], ["c", "a"]]


def uniform(engine):
    """The graphs of decode steps; those of prompts are captured when first met."""
    return [row for row in engine.graph_table() if row.descriptor.uniform]


def counted(draft):
    """N-gram drafts have no oracle of their own."""
    return draft != "ngram"


def check(engine, lora, draft, names, k=3, length=14, first=0):
    prompts = [PROMPTS[(first + i) % 5] for i in range(len(names))]
    outs = engine.generate(prompts, greedy(length), lora=list(names))
    for name, prompt, out in zip(names, prompts, outs, strict=True):
        expect(out, lora.expected(name, draft, prompt, k, length), counts=counted(draft))


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_every_row_uses_its_adapter_in_every_order(models, lora, draft, mode):
    """C42: base, A, B, A and B, base, B beside base; then C in the slot that A had."""
    with cpu_engine(
        models["target"], models.get(draft, draft), 3 if draft else 0, lora=lora.paths,
        max_loras=2, cudagraph_mode=mode, uniform_request_counts=[2, 5],
    ) as engine:  # fmt: skip
        captured = len(uniform(engine))
        for first, names in enumerate(ORDER):
            check(engine, lora, draft, names, first=first)
            decodes = [r for r in engine.recent_steps(100) if r.descriptor.uniform]
            assert decodes[-1].descriptor.has_lora == any(names)
        if mode != "NONE":
            assert_decodes_replayed(engine)
            assert len(uniform(engine)) == captured
        assert_no_leak(engine)
        engine.check_integrity()


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_DECODE_ONLY"])
def test_other_modes_apply_adapters_too(models, lora, mode):
    """Batches with adapters and prompts have graphs of their own, as decode steps have."""
    with cpu_engine(
        models["target"], models["blend.1"], 3, lora=lora.paths, cudagraph_mode=mode,
        uniform_request_counts=[2, 5], max_num_batched_tokens=16,
    ) as engine:  # fmt: skip
        for first, names in enumerate((["a", None, "b"], [None, None], ["c", "a"])):
            check(engine, lora, "blend.1", names, first=first)
        used = {
            (row.mode, row.descriptor.has_lora)
            for row in engine.graph_table()
            if row.replays and not row.descriptor.uniform
        }
        mixed = [] if mode == "FULL_DECODE_ONLY" else [(mode, False), (mode, True)]
        assert used == set(mixed)


SHAPES = [(None,), ("a",), ("b", None, "a")]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_every_order_of_capture(models, lora, order):
    """C42: keys are captured when first met, with and without adapters, between steps."""
    with cpu_engine(
        models["target"], models["blend.1"], 2, lora=lora.paths, capture="lazy",
        uniform_request_counts=[1, 5],
    ) as engine:  # fmt: skip
        for index in (*order, *order):
            check(engine, lora, "blend.1", SHAPES[index], k=2, length=8)
        assert_decodes_replayed(engine)
        shapes = [row.descriptor for row in engine.graph_table() if row.role == "step"]
        assert {shape.has_lora for shape in shapes} == {True, False}


def test_each_base_key_has_a_twin(models, lora):
    """For every request count and k; what drafts without adapters needs none."""
    options = {"max_num_seqs": 3, "extra_k": [1]}
    with cpu_engine(models["target"], models["same"], 3, **options) as engine:
        plain = [(row.role, row.descriptor, row.variant) for row in uniform(engine)]
    assert not any(descriptor.has_lora for _, descriptor, _ in plain)
    with cpu_engine(models["target"], models["same"], 3, max_loras=2, **options) as engine:
        both = [(row.role, row.descriptor, row.variant) for row in uniform(engine)]
        twins = [
            (role, descriptor._replace(has_lora=True), variant)
            for role, descriptor, variant in plain
            if role == "step"
        ]
        assert len(both) == len(set(both))
        assert set(both) == set(plain) | set(twins)
        # Without an adapter in the batch, adapters cost nothing.
        engine.generate(PROMPTS[:3], greedy(6))
        assert not any(row.replays for row in engine.graph_table() if row.descriptor.has_lora)


def test_an_adapter_may_come_to_an_engine_that_was_made_without(models, lora):
    with cpu_engine(
        models["target"], models["blend.1"], 3, uniform_request_counts=[2, 5]
    ) as engine:
        check(engine, lora, "blend.1", [None] * 2)
        before = {(row.role, row.descriptor) for row in uniform(engine)}
        running = engine.stream(PROMPTS[4], greedy(24))
        ids = list(next(running).token_ids)
        for name, path in lora.paths.items():
            engine.add_lora(name, path)
        for names in ORDER:
            check(engine, lora, "blend.1", names)
        ids += [token for event in running for token in event.token_ids]
        assert ids == lora.oracles[None].greedy(PROMPTS[4], 24)[0]
        assert_decodes_replayed(engine)
        after = {(row.role, row.descriptor) for row in uniform(engine)}
        assert before < after
        assert all(descriptor.has_lora for _, descriptor in after - before)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_graph_equals_eager_for_sampled_rows(engines, models, lora, temperature):
    params = [greedy(12, temperature=temperature, seed=i, top_k=40) for i in range(5)]
    names = ["a", None, "b", "c", "a"]
    texts = []
    for mode in ("FULL_AND_PIECEWISE", "NONE"):
        engine = engines(
            models["target"], models["blend.1"], 3, lora=lora.paths, cudagraph_mode=mode,
            uniform_request_counts=[5],
        )  # fmt: skip
        texts.append([out.token_ids for out in engine.generate(PROMPTS, params, lora=names)])
    assert texts[0] == texts[1]


def test_a_hundred_adapters_through_eight_slots(models, oracles, tmp_path):
    """Least recently used, no capture after the start, every row on its own adapter."""

    base = models["target"]
    paths = {
        f"n{i}": write_adapter(
            tmp_path / f"n{i}", base, seed=i, std=0.15, r=1 + i % 8, target_modules=["v_proj"]
        )
        for i in range(100)
    }
    oracle = Oracle(base)
    weights = {
        name: module.weight
        for name, module in oracle.model.named_modules()
        if name.endswith("v_proj")
    }
    plain = {name: weight.detach().clone() for name, weight in weights.items()}

    def text(name, prompt, length):
        tensors = adapter_tensors(paths[name])
        for site, weight in weights.items():
            a, b = (tensors[f"base_model.model.{site}.lora_{p}.weight"] for p in "AB")
            weight.data = plain[site] + (16 / a.shape[0]) * (b @ a)
        oracle._next.clear()
        return oracle.greedy(prompt, length)[0]

    with cpu_engine(
        base, "ngram", 2, lora=paths, max_loras=8, max_num_seqs=12,
        uniform_request_counts=[12], num_kv_blocks=200,
    ) as engine:  # fmt: skip
        table = uniform(engine)
        names = list(paths)
        prompts = [PROMPTS[i % 4] for i in range(100)]
        outs = engine.generate(prompts, greedy(5), lora=names)
        with torch.inference_mode():
            for name, prompt, out in zip(names, prompts, outs, strict=True):
                assert out.token_ids == text(name, prompt, 5), name
        assert len({tuple(out.token_ids) for out in outs}) > 50
        assert engine.stats().adapter_loads == 100
        # Eight in use stay in their slots; the longest unused makes room for a ninth.
        engine.generate(prompts[:8], greedy(2), lora=names[:8])
        loads = engine.stats().adapter_loads
        for name in (*names[1:8], "n0"):
            engine.generate(PROMPTS[0], greedy(2), lora=name)
        assert engine.stats().adapter_loads == loads
        engine.generate([PROMPTS[0]] * 3, greedy(2), lora=["n0", "n99", "n0"])
        for name in ("n0", "n99", *names[2:8]):
            engine.generate(PROMPTS[0], greedy(2), lora=name)
        assert engine.stats().adapter_loads == loads + 1
        engine.generate(PROMPTS[0], greedy(2), lora="n1")
        assert engine.stats().adapter_loads == loads + 2
        assert [(r.role, r.descriptor) for r in uniform(engine)] == [
            (r.role, r.descriptor) for r in table
        ]
        assert_decodes_replayed(engine)
        assert_no_leak(engine)
        engine.check_integrity()


def test_base_rows_pass_a_text_that_waits_for_a_slot(models, lora):
    """One slot: texts on three adapters take turns in their order, others go on beside them."""
    with cpu_engine(
        models["target"], models["blend.1"], 3, lora=lora.paths, max_loras=1,
        uniform_request_counts=[5],
    ) as engine:  # fmt: skip
        check(engine, lora, "blend.1", ["a", "b", None, "c", None, "a", "b", None])
        assert engine.stats().adapter_loads == 5
        assert_no_leak(engine)
        engine.check_integrity()


def test_merged_oracle_differs_from_the_base(lora):
    """The adapters change the text, so that a row on a wrong one is seen."""
    texts = {tuple(oracle.greedy(PROMPTS[0], 8)[0]) for oracle in lora.oracles.values()}
    assert len(texts) == 4
