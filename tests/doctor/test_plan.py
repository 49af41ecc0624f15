"""What the doctor says would be used is what an engine then is."""

import pytest
from harness import cpu_engine
from tiny import make_tiny

from specdec.config import EngineConfig
from specdec.doctor.facts import plan_checks, plan_facts
from specdec.doctor.plan import make_plan
from specdec.doctor.subject import read_subject
from specdec.sources import read_source
from specdec.verifier.attention.select import BACKENDS
from specdec.verifier.modes import AttentionCGSupport, CUDAGraphMode

SMALL = {"device": "cpu", "max_num_seqs": 5, "max_model_len": 96, "kv_block_size": 4}
CASES = {
    "plain": (None, 0, {}),
    "lookup": ("ngram", 4, {}),
    "draft model": ("blend.1", 3, {}),
    "auto k": ("blend.1", "auto", {"k_max": 2}),
    "extra k": ("layer_skip:1", 4, {"extra_k": [2]}),
    "sizes in tokens": ("ngram", 1, {"cudagraph_capture_sizes": [1, 2, 5, 10]}),
    "sizes in requests": ("ngram", 2, {"uniform_request_counts": [2, 5]}),
    "no graphs": ("ngram", 4, {"cudagraph_mode": "NONE"}),
    "full only": ("ngram", 4, {"cudagraph_mode": "FULL"}),
    "few blocks": ("ngram", 4, {"num_kv_blocks": 7}),
    "half": ("blend.1", 2, {"dtype": "bfloat16"}),
    "transformers": ("ngram", 4, {"model_impl": "transformers"}),
    "defaults": ("blend.1", 4, {"max_num_seqs": None, "max_model_len": None}),
}


def plan_of(models, draft, k, options):
    config = EngineConfig(**(SMALL | options))
    subject = read_subject(read_source(models["target"], config), models.get(draft, draft), config)
    return subject, make_plan(subject, config, k), config


@pytest.mark.parametrize(("draft", "k", "options"), CASES.values(), ids=CASES.keys())
def test_the_engine_is_what_was_planned(models, draft, k, options):
    _, plan, _ = plan_of(models, draft, k, options)
    with cpu_engine(models["target"], models.get(draft, draft), k, **options) as engine:
        graphs = engine._runner._graphs
        step = engine._runner.step
        assert plan.attention.backend.name == engine.attention.backend.name
        assert plan.attention.others == engine.attention.others
        assert plan.mode is graphs.dispatcher.mode
        assert plan.dispatcher.capture_list() == graphs.dispatcher.capture_list()
        assert plan.num_blocks == engine.stats().total_kv_blocks
        assert plan.block_size == engine.block_size
        assert plan.max_k == engine.k
        assert list(plan.allowed_k) == engine._scheduler.allowed_k
        assert plan.max_model_len == engine.max_model_len
        assert plan.max_num_seqs == step.state.max_num_seqs
        assert plan.vocab_size == step.vocab_size
        assert plan.dtype is step.model.dtype
        weights = list(step.model.parameters())
        assert plan.num_weights == sum(each.numel() for each in weights)
        assert plan.weight_bytes == sum(each.nbytes for each in weights)
        caches = [step.kv_cache]
        if draft == "blend.1":
            assert plan.draft_dtype is step.drafter.model.dtype
            caches.append(step.drafter.kv_cache)
        # One block more than the pool takes what padding writes.
        made = sum(cache.num_bytes for cache in caches) / (plan.num_blocks + 1)
        assert plan.block_bytes == made


def test_a_padded_vocabulary_is_not_emitted(tmp_path):
    folder = make_tiny(tmp_path, vocab=300, tokenizer="bytes", tokenizer_vocab=270)
    config = EngineConfig(**SMALL)
    plan = make_plan(read_subject(read_source(folder, config), None, config), config, 4)
    assert plan.vocab_size == 270
    assert plan.allowed_k == (0,)


def test_a_downgrade_and_its_reasons_are_named(models, monkeypatch):
    from specdec.verifier.attention.sdpa import SdpaBackend

    single = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    monkeypatch.setattr(
        SdpaBackend, "__init__", lambda self, device: setattr(self, "cg_support", single)
    )
    _, plan, config = plan_of(models, "ngram", 4, {"cudagraph_mode": "FULL_DECODE_ONLY"})
    assert plan.mode is CUDAGraphMode.FULL_DECODE_ONLY
    assert plan.full_k == (0,)
    (reason,) = plan.downgrades
    assert "UNIFORM_BATCH" in reason and single.name in reason
    checks = {check.name: check for check in plan_checks(plan, config, 512)}
    assert checks["graph mode"].status == "warning"
    assert reason in checks["graph mode"].found
    assert checks["coverage"].status == "warning"
    assert "k=4 up to 0 of 5" in checks["coverage"].found


@pytest.mark.parametrize(
    ("options", "name", "said"),
    [
        ({"exact": True}, "exact mode", "not batch-invariant"),
        ({"max_model_len": 513}, "context", "max_model_len is 513"),
    ],
)
def test_what_an_engine_would_refuse_is_a_fault(models, options, name, said):
    _, plan, config = plan_of(models, "ngram", 4, options)
    checks = {check.name: check for check in plan_checks(plan, config, 512)}
    assert checks[name].status == "fault"
    assert said in checks[name].found
    with pytest.raises(ValueError):
        cpu_engine(models["target"], "ngram", 4, **options)


def test_the_facts_name_every_backend_and_the_grid(models):
    subject, plan, config = plan_of(models, "blend.1", 3, {})
    facts = {fact.name.strip(): fact for fact in plan_facts(subject, plan, config)}
    assert facts["attention"].value == "sdpa"
    assert "CUDA" in facts["not triton"].value
    assert len([name for name in facts if name.startswith("not ")]) == len(BACKENDS) - 1
    assert facts["capture grid"].value == "k=0 and k=3: 1, 2, 4, 5 requests"
    assert "up to 5 requests" in facts["capture grid"].why
    assert facts["KV cache"].value.startswith("0.5 MiB: 120 blocks of 4, 480 tokens, 5 texts of 96")
    assert facts["exact mode"].value == "off"
