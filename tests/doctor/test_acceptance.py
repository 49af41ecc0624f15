"""The acceptance doctor: what it predicts is what a sound engine counts, and faults are named."""

import pytest
import torch
from adapters import write_adapter
from eagle_heads import make_head, whispering
from faulty_drafters import OldKeys, OnlyEager, UnreadPrompt, Wrapped, generous
from harness import PROMPTS, cpu_engine, greedy
from paged import load
from safetensors.torch import load_file, save_file
from tiny import blended, make_tiny, resized_vocab

from specdec.doctor import acceptance as acceptance_module
from specdec.doctor.acceptance import examine
from specdec.doctor.run import Settings, run_doctor
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.verifier import passes

SMALL = {"device": "cpu", "max_num_seqs": 5, "max_model_len": 96, "kv_block_size": 4}


def doctor(model, draft, k=4, tokens=24, **options):
    settings = Settings(
        model=model,
        draft=draft,
        k=k,
        engine=SMALL | {"uniform_request_counts": [5]} | options,
        acceptance=True,
        prompt_ids=PROMPTS,
        max_new_tokens=tokens,
    )
    report = run_doctor(settings)
    return report, {check.name: check for check in report.checks}


DRAFTS = ["same", "negated", "blend.1", "ngram", "suffix", "layer_skip:1", "ngram+blend.1"]


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
@pytest.mark.parametrize("draft", [*DRAFTS, "suffix+layer_skip:1"])
def test_a_sound_engine_accepts_what_is_predicted(models, draft, mode):
    """Token for token: two ways to the same counts that share no state."""
    name, plus, second = draft.rpartition("+")
    draft = f"{name}{plus}{models.get(second, second)}"
    options = {"cudagraph_mode": mode, "uniform_request_counts": [5], "suffix_history": 0}
    with cpu_engine(models["target"], draft, 4, **options) as engine:
        found = examine(engine, PROMPTS, 24)
    assert found.guesser.runs_alone
    assert not found.mismatches and found.other_text is None and not found.failed
    assert found.predicted == found.measured
    assert found.measured.steps > 0
    if draft == models["same"]:
        # Each text is 23 tokens after the first: four steps of five and one of three.
        assert found.measured.steps == 5 * len(PROMPTS)
        assert found.measured.by_position == [1.0] * 4
    if draft == models["negated"]:
        assert found.measured.accepted == 0


@pytest.mark.parametrize("family", ["gemma2", "deepseek_v3"])
def test_windows_and_latent_caches_are_forced_and_audited_too(tmp_path, family):
    options = {"gemma2": {"sliding_window": 5}, "deepseek_v3": {"layers": 3}}[family]
    target = make_tiny(tmp_path / "target", seed=1, family=family, **options)
    report, checks = doctor(target, str(target), tokens=16)
    assert report.exit_code == 0
    assert checks["draft KV"].status == checks["target's text"].status == "ok"
    assert report.acceptance["predicted"] == report.acceptance["measured"]
    assert report.acceptance["measured"]["acceptance_by_position"] == [1.0] * 4


@pytest.mark.parametrize("prefix", ["", "ngram+"])
def test_a_head_accepts_what_fresh_requests_do(tmp_path, prefix):
    """A head reads the target's states, so only what it carries from step to step is tested."""
    target = whispering(tmp_path / "target")
    head = make_head(target, tmp_path / "head")
    report, checks = doctor(str(target), f"{prefix}eagle:{head}", tokens=16)
    assert report.exit_code == 0
    assert checks["acceptance"].status == "ok"
    assert "fresh requests" in checks["acceptance"].found
    assert "reads wrongly in a prompt" in report.acceptance["blind_to"]
    assert report.acceptance["predicted"] == report.acceptance["measured"]
    assert report.acceptance["measured"]["accepted"] > 0
    assert checks["pairing"].status == "unseen" and "head" in checks["pairing"].found


def test_rows_of_an_adapter_are_predicted_from_their_own_texts(tmp_path, models):
    """The base draft model drafts for all rows; the target cannot be forced over an adapter's."""
    adapter = write_adapter(tmp_path / "adapter", models["target"], std=0.3)
    report, checks = doctor(models["target"], models["same"], lora={"style": adapter})
    assert report.exit_code == 0
    assert checks["adapter style"].status == "ok"
    assert report.acceptance["predicted"] == report.acceptance["measured"]
    # The adapter's two texts are not the base model's, so not all of the drafts stand.
    assert 0 < report.acceptance["measured"]["accepted"] < report.acceptance["measured"]["drafted"]
    assert "2 texts of adapters are not looked at" in checks["target's text"].found


def test_fresh_requests_predict_the_same(models, monkeypatch):
    """What is said of a drafter that nobody can look into."""
    with cpu_engine(models["target"], models["blend.1"], 4) as engine:
        alone = examine(engine, PROMPTS[:3], 20)
    wrapped = Wrapped(DraftModelDrafter(load(models["blend.1"]), vocab_size=128))
    with cpu_engine(models["target"], wrapped, 4) as engine:
        fresh = examine(engine, PROMPTS[:3], 20)
        assert engine.stats().free_kv_blocks == engine.stats().total_kv_blocks
    assert not fresh.guesser.runs_alone and fresh.audit is None
    assert not fresh.mismatches
    assert fresh.predicted == alone.predicted == fresh.measured


@pytest.mark.parametrize("options", [{"draft_context": 40}, {"eos": True}], ids=["context", "eos"])
def test_ends_and_short_contexts_are_predicted_too(tmp_path, models, options):
    with cpu_engine(models["target"], None, 0, cudagraph_mode="NONE") as engine:
        text = engine.generate(PROMPTS[0], greedy(30)).token_ids
    end = next(i for i in range(6, 30) if text[i] not in text[:i])
    eos = text[end] if options.get("eos") else None
    target = make_tiny(tmp_path / "target", seed=1, eos=eos)
    reach = options.get("draft_context", 512)
    draft = make_tiny(tmp_path / "draft", seed=1, eos=eos, max_position=reach)
    with cpu_engine(str(target), str(draft), 4, cudagraph_mode="NONE") as engine:
        found = examine(engine, PROMPTS, 40)
    assert not found.mismatches
    assert found.predicted == found.measured
    counts = [step.drafted for each in found.texts for step in each.steps]
    assert (0 in counts) == ("draft_context" in options)


def test_a_weak_drafter_is_called_weak_and_nothing_else(models):
    report, checks = doctor(models["target"], models["negated"])
    assert report.exit_code == 0
    assert checks["acceptance"].status == "ok"
    assert "predicted 1.00 tokens per step" in checks["acceptance"].found
    assert "measured 1.00" in checks["acceptance"].found
    assert checks["draft KV"].status == "ok"
    assert checks["drafter"].status == "warning"
    assert "weak" in checks["drafter"].found
    assert report.acceptance["causes"] == []


def test_a_good_drafter_that_costs_too_much_is_not_called_weak(models):
    """The target as its own draft: all is accepted, and nothing is won."""
    report, checks = doctor(models["target"], models["same"], cudagraph_mode="NONE")
    assert report.exit_code == 0
    drafter = checks["drafter"]
    assert drafter.status == "warning"
    assert "good but costly, each pass reads 100%" in drafter.found and "weak" not in drafter.found
    assert "smaller draft model" in drafter.todo


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
@pytest.mark.parametrize(
    ("fault", "where"), [(UnreadPrompt, "in the prompt"), (OldKeys, "position")]
)
def test_a_stale_draft_kv_is_named(models, fault, where, mode):
    drafter = fault(load(models["same"]), vocab_size=128)
    report, checks = doctor(models["target"], drafter, cudagraph_mode=mode)
    assert report.exit_code == 1
    assert checks["draft KV"].status == "fault"
    assert "stale" in checks["draft KV"].found and where in checks["draft KV"].found
    assert checks["acceptance"].status == "fault"
    assert "draft KV" in checks["acceptance"].todo
    assert checks["target's text"].status == "ok"
    figures = report.acceptance
    assert figures["predicted"]["acceptance_by_position"] == [1.0] * 4
    measured = figures["measured"]["mean_tokens_per_step"]
    assert measured < figures["predicted"]["mean_tokens_per_step"]


def test_a_stale_state_is_named_where_nobody_can_look_inside(models):
    drafter = Wrapped(OldKeys(load(models["same"]), vocab_size=128))
    report, checks = doctor(models["target"], drafter, cudagraph_mode="NONE")
    assert report.exit_code == 1
    assert checks["draft KV"].status == "unseen"
    assert checks["drafter's state"].status == "fault"
    assert "drafter's state" in checks["acceptance"].todo


def test_a_graph_that_is_stale_is_named(models):
    report, checks = doctor(models["target"], OnlyEager())
    assert report.exit_code == 1
    assert checks["graphs"].status == "fault"
    assert "without graphs" in checks["graphs"].found
    assert checks["acceptance"].todo == "at fault: graphs, as above"


def test_a_draft_of_other_rope_is_named_with_what_it_costs(tmp_path, models):
    draft = make_tiny(tmp_path / "draft", seed=1, rope_theta=10.0)
    report, checks = doctor(models["target"], str(draft))
    assert checks["rope"].status == "warning"
    assert "theta 10000 in the target, 10 in the draft" in checks["rope"].found
    # It runs as its files say, so the counts agree; the target's rope would make it perfect.
    assert checks["acceptance"].status == "ok"
    assert checks["draft's rope"].status == "fault"
    assert "would give 4.60 tokens per step" in checks["draft's rope"].found
    assert report.exit_code == 1


def test_another_rope_that_costs_nothing_is_no_fault(tmp_path, models):
    """A draft of other weights, trained under its own rope."""
    draft = make_tiny(tmp_path / "draft", seed=3, rope_theta=10.0)
    report, checks = doctor(models["target"], str(draft))
    assert checks["rope"].status == "warning"
    assert "draft's rope" not in checks
    assert report.exit_code == 0


def test_a_draft_that_overflows_in_its_dtype_is_named(tmp_path, models):
    """C21: activations of 1e5 fit bfloat16 and float32, not float16."""
    draft = make_tiny(tmp_path / "draft", seed=1, dtype=torch.bfloat16)
    tensors = load_file(draft / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] *= 2.0**17
    tensors["model.layers.0.mlp.down_proj.weight"] /= 2.0**17
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    report, checks = doctor(models["target"], str(draft), dtype="float16", cudagraph_mode="NONE")
    assert checks["dtypes"].status == "warning"
    assert "run in float16 and float16" in checks["dtypes"].found
    assert checks["draft's dtype"].status == "fault"
    assert "not finite in float16" in checks["draft's dtype"].found
    assert report.exit_code == 1


def test_a_text_that_is_not_the_targets_is_named(models, monkeypatch):
    """An accept rule that lets one more draft pass."""
    monkeypatch.setattr(passes, "accept_greedy", generous(passes.accept_greedy))
    report, checks = doctor(models["target"], models["negated"], cudagraph_mode="NONE")
    assert checks["target's text"].status == "fault"
    assert "prompt 0, token 1:" in checks["target's text"].found
    assert report.exit_code == 1


def test_graphs_that_were_not_captured_are_counted(models):
    with cpu_engine(models["target"], "ngram", 4) as engine:
        size = sum(row.num_bytes for row in engine.graph_table())

    def found(limit):
        engine = SMALL | {"graph_memory_limit": limit}
        settings = Settings(model=models["target"], draft="ngram", engine=engine, load=True)
        return {check.name: check for check in run_doctor(settings).checks}["capture"]

    # Four sizes up to five requests, at k=0 and at k=4.
    assert found(4 * size).status == "ok"
    assert found(4 * size).found == "all 8 planned graphs are there"
    assert found(size).status == "warning"
    assert "of 8 planned graphs were not captured" in found(size).found


def test_a_tokenizer_of_another_family_is_named_and_nothing_is_built(tmp_path):
    from tiny import write_tokenizer

    target = make_tiny(tmp_path / "target", vocab=260, tokenizer="bytes", eos=0)
    draft = make_tiny(tmp_path / "draft", vocab=260, tokenizer="bytes", eos=0)
    write_tokenizer(draft, "bytes", 260, swap=(257, 258))
    report, checks = doctor(str(target), str(draft))
    assert checks["tokenizers"].status == "fault"
    assert "id 257 is 'ab' in the target" in checks["tokenizers"].found
    assert checks["measurements"].status == "unseen"
    assert report.acceptance is None and report.exit_code == 1


def test_near_ties_are_not_called_faults(models, monkeypatch):
    """With every margin a close call, the same difference is no fault."""
    drafter = OldKeys(load(models["same"]), vocab_size=128)
    monkeypatch.setitem(acceptance_module.CLOSE_CALL, torch.float32, 1e9)
    with cpu_engine(models["target"], drafter, 4, cudagraph_mode="NONE") as engine:
        found = examine(engine, PROMPTS, 24)
    assert found.mismatches and not found.unexplained


def test_padding_of_the_vocabulary_is_not_predicted(tmp_path):
    target = make_tiny(tmp_path / "target", seed=1, tokenizer="bytes", vocab=260, eos=0)
    draft = resized_vocab(
        blended(target, tmp_path / "blend", 0.1), tmp_path / "wide", 300, loud=True
    )
    with cpu_engine(str(target), str(draft), 3, cudagraph_mode="NONE") as engine:
        found = examine(engine, PROMPTS, 16)
    assert not found.mismatches
    assert found.measured.accepted > 0
