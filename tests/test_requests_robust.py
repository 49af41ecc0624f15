"""P3 and P7 for broken logits and odd requests: C51, C56."""

import shutil
from pathlib import Path

import pytest
from harness import PROMPTS, assert_no_leak, cpu_engine, greedy
from oracle import expect, speculate
from safetensors.torch import load_file, save_file
from tiny import EMBEDDING, make_tiny

import specdec

ONE_RUNG = {"uniform_request_counts": [5]}


@pytest.fixture(scope="module")
def poisoned(models, oracles, tmp_path_factory):
    """A copy whose embedding of one token is NaN: a text breaks once it holds that token.

    The token is the fourth that PROMPTS[3] produces, and none of the other texts ever holds it.
    """
    texts = [[*prompt, *oracles["target"].greedy(prompt, 20)[0]] for prompt in PROMPTS]
    own, _ = oracles["target"].greedy(PROMPTS[3], 20)
    others = {token for i, text in enumerate(texts) if i != 3 for token in text}
    index = next(
        i for i in range(2, 20) if own[i] not in others and own[i] not in [*PROMPTS[3], *own[:i]]
    )
    folder = tmp_path_factory.mktemp("poisoned") / "model"
    shutil.copytree(models["target"], folder)
    file = Path(folder) / "model.safetensors"
    tensors = load_file(file)
    tensors[EMBEDDING][own[index]] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    return str(folder), own[: index + 1]


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
@pytest.mark.parametrize("draft", ["same", "blend.1", "negated", None])
def test_a_row_with_nan_logits_ends_alone(models, oracles, poisoned, draft, mode):
    """C51: finish "error" after the last sound token; the neighbours are those of a solo run."""
    folder, sound = poisoned
    with cpu_engine(folder, models.get(draft, draft), 4, cudagraph_mode=mode, **ONE_RUNG) as engine:
        outs = engine.generate(PROMPTS, greedy(20))
        assert (outs[3].token_ids, outs[3].finish_reason) == (sound, "error")
        for i in (0, 1, 2, 4):
            expected = speculate(
                oracles["target"], oracles.get(draft), PROMPTS[i], k=4, max_new_tokens=20
            )
            expect(outs[i], expected)
        hot = engine.generate(PROMPTS, [greedy(20, temperature=1.0, seed=i) for i in range(5)])
        assert all(0 <= token < 128 for out in hot for token in out.token_ids)
        assert {out.finish_reason for out in hot} <= {"length", "error"}
        assert_no_leak(engine)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_in_the_draft_only_means_rejection(models, oracles, poisoned, temperature):
    folder, _ = poisoned
    with cpu_engine(models["target"], folder, 4, **ONE_RUNG) as engine:
        params = [greedy(20, temperature=temperature, seed=seed) for seed in range(5)]
        for prompt, out in zip(PROMPTS, engine.generate(PROMPTS, params), strict=True):
            assert len(out.token_ids) == 20 and out.finish_reason == "length"
            assert all(0 <= token < 128 for token in out.token_ids)
            if temperature == 0:
                assert out.token_ids == oracles["target"].greedy(prompt, 20)[0]


@pytest.mark.parametrize("draft", ["same", "ngram", None])
def test_requests_of_length_one_and_zero(tmp_path, models, oracles, draft):
    """C56: empty, one token, a prompt that is EOS, a first token that is EOS; alone and in mixed
    batches of running requests.
    """
    text, _ = oracles["target"].greedy([64], 9)
    target = str(make_tiny(tmp_path / "target", seed=1, eos=text[0]))
    with cpu_engine(target, models.get(draft, draft), 4, **ONE_RUNG) as engine:
        running = engine.stream(PROMPTS[3], greedy(40, ignore_eos=True))
        ids = list(next(running).token_ids)
        for prompt in ([], ""):
            with pytest.raises(ValueError):
                engine.generate(prompt, greedy(4))
        with pytest.raises(ValueError, match="max_new_tokens"):
            engine.generate([64], greedy(0))
        ids += next(running).token_ids
        first_is_eos = engine.generate([64], greedy(9))
        assert (first_is_eos.token_ids, first_is_eos.finish_reason) == ([text[0]], "stop")
        assert engine.generate([64], greedy(9, ignore_eos=True)).token_ids == text
        one = engine.generate([64], greedy(1, ignore_eos=True))
        assert (one.token_ids, one.finish_reason) == (text[:1], "length")
        for prompt in ([text[0]], [text[0], text[0]]):
            expected = oracles["target"].greedy(prompt, 9, (text[0],))
            out = engine.generate(prompt, greedy(9))
            assert (out.token_ids, out.finish_reason) == expected
        ids += [token for event in running for token in event.token_ids]
        assert ids == oracles["target"].greedy(PROMPTS[3], 40)[0]
        assert_no_leak(engine)


class RaisesOnce(specdec.Drafter):
    """A host drafter that fails in its third step."""

    name = "raises once"

    def __init__(self):
        self.calls = 0

    def propose(self, state, k):
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("planted")
        return state.last_token[:, None].expand(-1, k)


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_step_that_fails_changes_no_text(models, oracles, block_size):
    """P7: rows, chunks of prompts and the prefix cache are as if that step had not been."""
    long = [(7 * i) % 128 for i in range(40)]
    with cpu_engine(
        models["target"],
        RaisesOnce(),
        4,
        kv_block_size=block_size,
        max_num_batched_tokens=16,
    ) as engine:
        first = engine.add_request(PROMPTS[0], greedy(30))[0]
        engine.step()
        second = engine.add_request(long, greedy(30))[0]
        while not (first.finish_reason and second.finish_reason):
            engine.step()
        assert engine.drafter.calls > 3
        for request in (first, second):
            assert request.output_ids == oracles["target"].greedy(request.prompt_ids, 30)[0]
        again = engine.generate([PROMPTS[0], long], greedy(30))
        assert [out.token_ids for out in again] == [first.output_ids, second.output_ids]
        engine.check_integrity()
        assert_no_leak(engine)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e-40, "seed": 1},
        {"logit_bias": {5: 1e300}, "temperature": 1.0, "seed": 1},
        {"presence_penalty": -1e300},
        {"frequency_penalty": 1e39},
        {"repetition_penalty": 1e-320, "temperature": 1.0, "seed": 1},
        {"repetition_penalty": 1e300},
        {"top_k": 2**63},
        {"min_tokens": 2**63, "max_new_tokens": 2**63},
    ],
    ids=str,
)
def test_values_past_float32_decide_and_do_not_break(models, oracles, fields):
    """Whatever the size of a value: no NaN, no id from nowhere, nobody else disturbed."""
    with cpu_engine(models["target"], models["blend.1"], 4, **ONE_RUNG) as engine:
        fields = {"max_new_tokens": 20, **fields}
        params = [specdec.SamplingParams(**fields), greedy(20)]
        odd, other = engine.generate([PROMPTS[0], PROMPTS[3]], params)
        assert other.token_ids == oracles["target"].greedy(PROMPTS[3], 20)[0]
        assert odd.finish_reason in ("length", "stop")
        plain = oracles["target"].greedy(PROMPTS[0], len(odd.token_ids))[0]
        if "logit_bias" in fields:
            assert set(odd.token_ids) == {5}
        elif set(fields) & {"temperature", "top_k", "min_tokens"} and len(fields) < 4:
            assert odd.token_ids == plain


def test_where_every_token_is_banned_the_row_ends_in_error(tmp_path):
    from tiny import constant_model

    folder = str(constant_model(tmp_path / "model", [0.4, 0.3, 0.2, 0.1]))
    with cpu_engine(folder, None) as engine:
        banned = greedy(5, bad_words=[[0], [1], [2], [3]])
        seeded = greedy(5, bad_words=[[0], [1], [2], [3]], temperature=1.0, seed=3)
        outs = engine.generate([[1], [1], [1]], [banned, seeded, greedy(5)])
        assert [out.finish_reason for out in outs] == ["error", "error", "length"]
        assert [out.token_ids for out in outs[:2]] == [[], []]


def test_a_stream_that_was_never_started_ends_with_its_owner(models):
    with cpu_engine(models["target"], None) as engine:
        for end in (lambda stream: stream.close(), lambda stream: None):
            end(engine.stream(PROMPTS[0], greedy(20)))
            assert not engine._tails
        assert_no_leak(engine)


def test_numpy_integers_are_integers(models):
    import numpy as np

    with cpu_engine(models["target"], "ngram", 4) as engine:
        with pytest.raises(ValueError, match="k must be"):
            engine.generate([1, 2], greedy(4, k=np.int64(9)))
        params = greedy(6, k=np.int64(2), seed=np.uint64(2**64 - 1), temperature=1.0)
        same = greedy(6, seed=2**64 - 1, temperature=1.0)
        assert engine.generate([1, 2], params).token_ids == engine.generate([1, 2], same).token_ids


@pytest.mark.parametrize("budget", [5, 6, 9])
def test_prompts_do_not_starve_behind_rows_of_a_small_budget(models, budget):
    with cpu_engine(models["target"], models["same"], 4, max_num_batched_tokens=budget) as engine:
        engine.add_request(PROMPTS[0], greedy(80))
        engine.step()
        late = engine.add_request([1, 2, 3, 4, 5, 6], greedy(5))[0]
        for _ in range(14):
            engine.step()
        assert late.output_ids
