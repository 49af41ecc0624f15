"""Engines over several ranks, as processes on the CPU: the text is that of one rank.

Every engine here runs with ``debug``, so that in each step the ranks compare the graph they took
and the tokens they commit.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from adapters import write_adapter
from eagle_heads import make_head, whispering
from harness import assert_decodes_replayed, assert_no_leak, cpu_engine, greedy
from tiny import blended, make_tiny

import specdec
from specdec.parallel import leader
from specdec.parallel.ranks import RankLostError

PROMPTS = [[5, 17, 99, 4], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [7] * 14]


def ranks(model, draft=None, k=4, *, size=2, **options):
    few = {"max_num_seqs": 3, "uniform_request_counts": [3]}
    return cpu_engine(model, draft, k, tensor_parallel_size=size, debug=True, **few, **options)


def alone(model, draft=None, k=4, **options):
    return cpu_engine(model, draft, k, max_num_seqs=3, uniform_request_counts=[3], **options)


def texts(engine, params, **options):
    return [each.token_ids for each in engine.generate(PROMPTS, params, **options)]


def counts(generations):
    return [(g.stats.drafted_per_step, g.stats.accepted_per_step) for g in generations]


SAMPLED = {
    "coupled": {"temperature": 0.8, "seed": 3},
    "cut": {"temperature": 1.0, "seed": 4, "top_p": 0.8, "top_k": 40, "min_p": 0.01},
    "penalties": {"temperature": 0.0, "presence_penalty": 0.6, "repetition_penalty": 1.3},
}


def check_lossless(several, one, sampled=("coupled",), **options):
    """Text, counts and logprobs at any k, greedy and sampled, of several ranks and of one."""
    expected = one.generate(PROMPTS, greedy(16), **options)
    got = several.generate(PROMPTS, greedy(16), **options)
    assert [each.token_ids for each in got] == [each.token_ids for each in expected]
    assert counts(got) == counts(expected)
    assert texts(several, greedy(16, k=0), **options) == [each.token_ids for each in got]
    for name in sampled:
        fields = SAMPLED[name]
        params = greedy(8, **fields)
        text = texts(several, params, **options)
        assert text == texts(one, params, **options)
        assert text == texts(several, greedy(8, k=0, **fields), **options)
    assert_decodes_replayed(several)
    assert_no_leak(several)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A model whose vocabulary no number of ranks divides; its draft and its adapters."""
    root = tmp_path_factory.mktemp("ranks")
    model = make_tiny(root / "target", seed=1, vocab=123)
    return SimpleNamespace(
        model=str(model),
        draft=str(blended(model, root / "draft", 0.1)),
        a=write_adapter(root / "a", model, seed=1),
        b=write_adapter(root / "b", model, seed=2, r=3, target_modules=["o_proj", "up_proj"]),
    )


@pytest.fixture(scope="module")
def looking_up(target):
    """Two ranks that look drafts up, with an adapter."""
    with ranks(target.model, "ngram", lora={"a": target.a}) as engine:
        yield engine


def test_lookup_writes_the_text_of_one_rank(looking_up, target):
    with alone(target.model, "ngram", lora={"a": target.a}) as one:
        check_lossless(looking_up, one, sampled=SAMPLED)


def test_adapters_in_one_batch_write_the_text_of_one_rank(looking_up, target):
    """One is there from the start, one comes later in place, one row has none."""
    with alone(target.model, "ngram", lora={"a": target.a}) as one:
        for engine in (looking_up, one):
            engine.add_lora("b", target.b)
        check_lossless(looking_up, one, lora=["a", "b", None])
        apart = [
            looking_up.generate([prompt], greedy(16), lora=name)[0].token_ids
            for prompt, name in zip(PROMPTS, ("a", "b", None), strict=True)
        ]
        assert apart == texts(looking_up, greedy(16), lora=["a", "b", None])
        assert (
            len({*map(tuple, texts(looking_up, greedy(16), lora="a"))} & {*map(tuple, apart)}) == 1
        )
        looking_up.remove_lora("b")


def test_logprobs_and_formats_see_the_whole_vocabulary(looking_up, target):
    with alone(target.model, "ngram", lora={"a": target.a}) as one:
        for got, expected in zip(
            looking_up.generate(PROMPTS, greedy(6, logprobs=3)),
            one.generate(PROMPTS, greedy(6, logprobs=3)),
            strict=True,
        ):
            for token, other in zip(got.logprobs, expected.logprobs, strict=True):
                assert list(token.top) == list(other.top)
                assert token.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_an_aborted_text_leaves_the_ranks_together(looking_up):
    stream = looking_up.stream(PROMPTS[0], greedy(30))
    next(stream)
    stream.close()
    assert texts(looking_up, greedy(8)) == texts(looking_up, greedy(8, k=0))
    assert_no_leak(looking_up)


@pytest.mark.parametrize("draft_size", [2, 1], ids=["draft in parts", "draft whole"])
def test_a_draft_model_writes_the_text_of_one_rank(target, draft_size):
    options = {"draft_tensor_parallel_size": draft_size}
    with (
        ranks(target.model, target.draft, **options) as several,
        alone(target.model, target.draft) as one,
    ):
        check_lossless(several, one)
        assert several.stats().accepted > 20
        drafter = several.drafter.model.local_config
        assert drafter.num_heads == 4 // draft_size


def test_an_eagle_head_writes_the_text_of_one_rank(tmp_path):
    """The head is whole on each rank, with the target's embedding put together."""
    model = whispering(tmp_path / "target")
    draft = f"eagle:{make_head(model, tmp_path / 'head', noise=0.1, history=0.2)}"
    with ranks(model, draft) as several, alone(model, draft) as one:
        check_lossless(several, one)
        assert several.stats().accepted > 10


def test_the_first_layers_draft_and_the_first_adapter_comes_late(target):
    """Adapters are told of before any rank has room for them; drafts go through them too."""
    with ranks(target.model, "layer_skip:1", k="auto", k_max=2) as several:
        plain = texts(several, greedy(16))
        several.add_lora("a", target.a)
        adapted = texts(several, greedy(16), lora="a")
        assert texts(several, greedy(16)) == plain != adapted
        with alone(target.model, "layer_skip:1", 2, lora={"a": target.a}) as one:
            assert texts(one, greedy(16)) == plain and texts(one, greedy(16), lora="a") == adapted


@pytest.mark.parametrize(
    "options",
    [
        {"cudagraph_mode": "PIECEWISE"},
        {"cudagraph_mode": "NONE", "compilation_config": {"mode": 3, "backend": "eager"}},
        {"steps_per_replay": 3, "verify_graphs": True},
        {"draft": "suffix", "max_num_batched_tokens": 8, "num_kv_blocks": 16},
    ],
    ids=["pieces", "compiled pieces", "several rounds", "short of blocks"],
)
def test_other_ways_to_run_write_the_same_text(looking_up, target, options):
    """The sum is an operator inside a piece; prompts come in chunks and rows are preempted."""
    expected = texts(looking_up, greedy(16))
    options = {"draft": "ngram", "capture": "lazy"} | options
    with ranks(target.model, **options) as several:
        assert texts(several, greedy(16)) == expected
        assert texts(several, greedy(16, k=0)) == expected
        assert_no_leak(several)


def test_four_ranks_with_two_key_value_heads(target):
    """Each head of keys and values lies on two ranks, and the draft model is in parts too."""
    with (
        ranks(target.model, target.draft, size=4) as several,
        alone(target.model, target.draft) as one,
    ):
        check_lossless(several, one)


# -- the end -----------------------------------------------------------------------------------


LISTED = "ps -ww -o pid=,args= --ppid"


def children(parent=None):
    """Process ids of the ranks that this process, or another, has started."""
    command = [*LISTED.split(), str(parent or os.getpid())]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in found.stdout.splitlines() if "specdec.parallel" in line]
    return [int(line.split()[0]) for line in lines]


def test_a_rank_that_is_killed_is_named_at_once(target):
    others = set(children())
    engine = ranks(target.model, "ngram")
    (pid,) = set(children()) - others
    engine.add_request(PROMPTS[0], greedy(60))
    for _ in range(3):
        engine.step()
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RankLostError, match=rf"^rank 1 of 2 was lost.* {pid}.*signal 9"):
        for _ in range(60):
            engine.step()
    with pytest.raises(RankLostError, match="rank 1"):
        engine.generate(PROMPTS, greedy(4))
    engine.close()
    assert time.monotonic() - started < 30
    assert pid not in children()


def test_a_rank_that_does_not_go_on_is_ended(target, monkeypatch):
    """It has not ended, so that nothing else would tell: rank 0 waits for its part of a sum."""
    monkeypatch.setattr(leader, "SILENT_SECONDS", 3)
    with ranks(target.model, capture="lazy") as engine:
        engine.generate(PROMPTS, greedy(4))
        engine._ranks._followers[0].process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(RankLostError, match=r"rank 1 of 2 was lost.*no sign of life for 3"):
            engine.generate(PROMPTS, greedy(40))
        assert time.monotonic() - started < 30


def test_a_call_that_fails_on_all_ranks_is_given_back(looking_up):
    """As on one rank a step that fails is as if it had not been; the ranks stay together."""
    expected = texts(looking_up, greedy(8))
    request = looking_up.add_request(PROMPTS[0], greedy(8))[0]
    looking_up.step()
    with pytest.raises((RuntimeError, TypeError, ValueError)) as failed:
        looking_up._runner.write_k([0], ["not a number"])
    looking_up._ranks.recover(failed.value)
    while request.finish_reason is None:
        looking_up.step()
    assert request.output_ids == expected[0]
    assert texts(looking_up, greedy(8)) == expected


def test_a_call_that_fails_on_one_rank_ends_the_engine(target):
    with ranks(target.model, capture="lazy") as engine:
        engine._ranks.tell("write_k", [0], ["not a number"])
        with pytest.raises(RankLostError, match=r"rank 1 of 2 was lost.*exit code 1: \w+Error"):
            for _ in range(30):
                engine.generate(PROMPTS, greedy(4))
                time.sleep(0.1)


def test_a_rank_that_cannot_start_is_named(target, monkeypatch):
    monkeypatch.setattr(leader, "_CODE", "raise SystemExit(7)")
    others, started = children(), time.monotonic()
    with pytest.raises(RankLostError, match=r"^rank 1 of 2 was lost.*exit code 7"):
        ranks(target.model)
    assert time.monotonic() - started < 30
    assert children() == others


def test_ranks_end_with_the_process_that_started_them(target):
    """Its end is all that they hear of."""
    code = (
        "import specdec\n"
        f"specdec.Engine({target.model!r}, device='cpu', tensor_parallel_size=2, capture='lazy')\n"
        "print('ready', flush=True)\n"
        "input()\n"
    )
    command = [sys.executable, "-P", "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
        (pid,) = children(parent.pid)
        parent.kill()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"rank 1, process {pid}, lives on"
        time.sleep(0.1)


# -- what is refused -----------------------------------------------------------------------------


class Own(specdec.Drafter):
    def propose(self, state, k):
        return torch.zeros(len(state.slots), k, dtype=torch.int64)


@pytest.mark.parametrize(
    ("draft", "options", "message"),
    [
        (None, {"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1"),
        (None, {"tensor_parallel_size": None}, "tensor_parallel_size must be an integer"),
        (None, {"tensor_parallel_size": "2"}, "tensor_parallel_size must be an integer"),
        (None, {"tensor_parallel_size": 3}, "tensor_parallel_size=3: num_attention_heads"),
        (
            "ngram",
            {"tensor_parallel_size": 4, "draft_tensor_parallel_size": 2},
            "draft_tensor_parallel_size must be 1 or tensor_parallel_size",
        ),
        (Own(), {"tensor_parallel_size": 2}, "tensor_parallel_size=2: a drafter of your own"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused_before_any_starts(target, draft, options, message):
    before = children()
    with pytest.raises((ValueError, TypeError), match=message):
        cpu_engine(target.model, draft, **options)
    assert children() == before


def test_a_model_that_is_loaded_is_refused(target):
    with alone(target.model) as engine:
        model = engine._runner.step.model
    with pytest.raises(ValueError, match=r"^model: .*tensor_parallel_size"):
        cpu_engine(model, tensor_parallel_size=2)


def test_more_gpus_than_there_are_is_refused(target, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="tensor_parallel_size=2 is more than the 1 GPUs"):
        cpu_engine(target.model, device="cuda", tensor_parallel_size=2)


def test_generate_takes_the_number_of_ranks(target):
    with pytest.raises(ValueError, match=re.escape("tensor_parallel_size=3: num_attention_heads")):
        specdec.generate(
            PROMPTS[0], model=target.model, draft=None, device="cpu", tensor_parallel_size=3
        )
