"""--verify-lossless: a sound engine passes, a fault that changes a text is found where it is."""

import pytest
import torch
from adapters import write_adapter
from faulty_drafters import generous
from harness import PROMPTS, cpu_engine, greedy
from paged import load, logits_of

from specdec.doctor import lossless as lossless_module
from specdec.doctor.lossless import target_gap
from specdec.doctor.matrix import ARRIVALS, KS, cells
from specdec.doctor.run import Settings, run_doctor
from specdec.drafters.layer_skip import LayerSkipDrafter
from specdec.verifier import acceptance as rules
from specdec.verifier import passes

SMALL = {
    "device": "cpu",
    "max_num_seqs": 5,
    "max_model_len": 96,
    "kv_block_size": 4,
    "cudagraph_mode": "NONE",
}


def verify(model, draft, k=4, seconds=600.0, tokens=8, prompts=PROMPTS[:2], **options):
    report = run_doctor(
        Settings(
            model=model,
            draft=draft,
            k=k,
            engine=SMALL | options,
            lossless=True,
            seconds=seconds,
            prompt_ids=prompts,
            max_new_tokens=tokens,
        )
    )
    return report, {check.name: check for check in report.checks}["lossless"]


def test_the_matrix_has_every_combination_once():
    for ks in (KS, (0, 1, 2, 3, 4), (0, 1, 2, 4, 7)):
        for seeded in (False, True):
            found = cells("given", ks, seeded=seeded, small_step=24)
            assert len(set(found)) == len(found) == len(ks) * len(ARRIVALS) * 2 * (1 + seeded)
            # The first few have something of each side, and drafts.
            first = found[:6]
            assert found[0].k == max(ks)
            for name in ("arrival", "step_tokens", "k"):
                assert len({getattr(cell, name) for cell in first}) > 1, name


def test_a_sound_engine_is_lossless_in_every_cell(models):
    report, check = verify(models["target"], models["blend.1"], tokens=6, prompts=PROMPTS[:3])
    assert check.status == "ok" and report.exit_code == 0
    figures = report.lossless
    # Two drafters, k in {0, 1, 2, 4}, two arrivals, two step sizes, greedy and coupled.
    assert figures["cells_run"] == figures["cells_total"] == 64
    assert figures["prompts"] == 3
    assert figures["compared"] == 64 * 3 * 6
    assert figures["differences"] == []
    assert "1,152 tokens" in check.found
    assert "all equal" in check.found


def test_time_is_kept_and_what_was_left_out_is_said(models):
    report, check = verify(models["target"], models["blend.1"], seconds=1e-6, prompts=PROMPTS)
    figures = report.lossless
    # Each drafter has one cell at least, and two prompts.
    assert (figures["cells_run"], figures["cells_total"]) == (2, 64)
    assert (figures["prompts"], figures["compared"]) == (2, 2 * 2 * 8)
    assert "62 cells did not fit" in check.found
    assert check.status == "ok"


def test_rows_of_an_adapter_are_compared_too(tmp_path, models, monkeypatch):
    adapter = write_adapter(tmp_path / "adapter", models["target"], std=0.3)
    report, check = verify(models["target"], "ngram", lora={"style": adapter}, tokens=4)
    assert check.status == "ok"
    assert report.lossless["compared"] == 32 * 2 * 4
    monkeypatch.setattr(passes, "accept_greedy", generous(passes.accept_greedy))
    report, check = verify(models["target"], models["negated"], lora={"style": adapter}, tokens=3)
    assert check.status == "fault"
    of_adapter = [each for each in report.lossless["differences"] if each["prompt"] == 1]
    assert of_adapter and all(each["gap"] > 0 for each in of_adapter)


def test_rejection_sampling_leaves_the_coupled_cells_out(models):
    report, check = verify(models["target"], "ngram", tokens=4, acceptance="rejection")
    assert report.lossless["cells_total"] == 16
    assert check.status == "ok"


def test_a_greedy_accept_rule_that_is_too_generous_is_found(models, monkeypatch):
    monkeypatch.setattr(passes, "accept_greedy", generous(passes.accept_greedy))
    report, check = verify(models["target"], models["negated"])
    assert check.status == "fault" and report.exit_code == 1
    differences = report.lossless["differences"]
    assert all(not each["seeded"] for each in differences)
    first = differences[0]
    assert first["cell"].startswith("given") and "k=0" not in first["cell"]
    # The first step's first draft is wrong, and so is the second token of the text.
    assert first["position"] == 1
    assert "differs first at token 1" in check.found
    ids = solo(models, PROMPTS[first["prompt"]], 8)
    assert first["expected"] == ids[1] != first["got"]
    logits = logits_of(load(models["target"]), [*PROMPTS[first["prompt"]], ids[0]])[-1]
    best = logits.topk(2).values
    assert first["gap"] == pytest.approx(float(best[0] - best[1]), abs=1e-4)


def solo(models, prompt, tokens):
    with cpu_engine(models["target"], None, 0, cudagraph_mode="NONE") as engine:
        return engine.generate(prompt, greedy(tokens)).token_ids


def test_a_coupled_accept_rule_at_fault_is_found(models, monkeypatch):
    """The noise of another output index: each text is drawn from the right distribution still."""
    noise = rules.coupled_tokens

    def shifted(logp, rows):
        return noise(logp, rows.at(1) if logp.shape[1] > 2 else rows)

    monkeypatch.setattr(rules, "coupled_tokens", shifted)
    report, check = verify(models["target"], "ngram")
    assert check.status == "fault"
    assert all(
        each["seeded"] and "coupled" in each["cell"] for each in report.lossless["differences"]
    )
    assert "noisy log-probabilities" in check.found


def test_a_drafter_that_damages_the_targets_kv_is_found(models, monkeypatch):
    """The one way in which a drafter can change a text: through memory that it shares."""
    propose = LayerSkipDrafter.propose

    def careless(self, state, k):
        self.kv_cache.keys[:, state.block_table[:, 0].long(), 0] = 0.0
        return propose(self, state, k)

    monkeypatch.setattr(LayerSkipDrafter, "propose", careless)
    report, check = verify(models["target"], "layer_skip:1")
    assert check.status == "fault" and report.exit_code == 1
    assert all(each["cell"].startswith("given") for each in report.lossless["differences"])


def test_the_gap_of_a_seeded_token_is_that_of_its_noisy_scores(models):
    """The token it took is the best; 200 gaps of one position each are all positive."""
    with cpu_engine(models["target"], None, 0, cudagraph_mode="NONE") as engine:
        params = greedy(12, temperature=0.8, top_p=0.95, top_k=50, seed=3)
        (request,) = engine.add_request(PROMPTS[0], params)
        while request.finish_reason is None:
            engine.step()
        gaps = [
            target_gap(engine, PROMPTS[0] + request.output_ids[:at], request, at)
            for at in range(12)
        ]
    assert min(gaps) >= 0 and len(set(gaps)) == 12


def test_a_near_tie_is_a_warning_where_bits_are_not_promised(models, monkeypatch):
    monkeypatch.setattr(passes, "accept_greedy", generous(passes.accept_greedy))
    monkeypatch.setitem(lossless_module.CLOSE_CALL, torch.float32, 1e9)
    report, check = verify(models["target"], models["negated"], tokens=4)
    assert check.status == "warning" and report.exit_code == 0
    assert "near ties" in check.found
