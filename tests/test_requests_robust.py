"""P3 and P7 for broken logits and odd requests: C51, C56."""

import shutil
from pathlib import Path

import pytest
from harness import PROMPTS, assert_no_leak, cpu_engine, greedy
from oracle import expect, speculate
from safetensors.torch import load_file, save_file
from tiny import EMBEDDING, make_tiny

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
