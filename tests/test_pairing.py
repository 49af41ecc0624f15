"""Cases of group D: target and draft with other vocabularies, tokenizers, ends and tied heads."""

import json
import shutil
from pathlib import Path

import pytest
from harness import PROMPTS, assert_no_leak, cpu_engine, greedy
from oracle import Oracle, expect, speculate
from safetensors.torch import load_file, save_file
from tiny import blended, constant_model, make_tiny, resized_vocab, write_tokenizer

REAL = 100
ONE_RUNG = {"uniform_request_counts": [5]}
SHORT = [[token % REAL for token in prompt] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """One model of 100 real tokens as checkpoints of 128 and of 104 rows, heads full of noise."""
    root = tmp_path_factory.mktemp("padded")
    wide = make_tiny(root / "wide", seed=4, tokenizer="words", tokenizer_vocab=REAL)
    narrow = resized_vocab(wide, root / "narrow", 104)
    noisy = blended(wide, root / "noisy", 0.1)
    return {
        "wide": str(wide),
        "narrow": str(narrow),
        "noisy": str(noisy),
        "noisy narrow": str(resized_vocab(noisy, root / "noisy_narrow", 104)),
    }


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
@pytest.mark.parametrize(
    ("target", "draft"),
    [("wide", "noisy narrow"), ("narrow", "noisy"), ("wide", "narrow"), ("narrow", "wide")],
)
def test_padded_vocabularies_pass(padded, target, draft, mode):
    """C19: padding rows are masked on both sides, so only real tokens are drafted and emitted."""
    reference, proposer = Oracle(padded[target], vocab=REAL), Oracle(padded[draft], vocab=REAL)
    unmasked = Oracle(padded["wide"])
    if target == "wide":
        # Without the mask this model would emit padding, or the case tests nothing.
        texts = [unmasked.greedy(prompt, 20)[0] for prompt in SHORT]
        assert any(token >= REAL for text in texts for token in text)
    with cpu_engine(padded[target], padded[draft], 4, cudagraph_mode=mode, **ONE_RUNG) as engine:
        for prompt, out in zip(SHORT, engine.generate(SHORT, greedy(20)), strict=True):
            expect(out, speculate(reference, proposer, prompt, k=4, max_new_tokens=20))
        hot = [greedy(20, temperature=1.5, seed=seed) for seed in range(5)]
        for out in engine.generate(SHORT, hot):
            assert all(0 <= token < REAL for token in out.token_ids)
        assert_no_leak(engine)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_loud_padding_row_of_the_draft_is_never_emitted(tmp_path, padded, temperature):
    """C19: the draft's padding row has a logit of +30 whatever the context."""
    draft = constant_model(
        tmp_path / "loud",
        [1 / REAL] * REAL,
        vocab=104,
        padding_logit=30.0,
        tokenizer="words",
        tokenizer_vocab=REAL,
    )
    reference = Oracle(padded["wide"], vocab=REAL)
    with cpu_engine(padded["wide"], str(draft), 4, **ONE_RUNG) as engine:
        params = [greedy(20, temperature=temperature, seed=seed) for seed in range(5)]
        outs = engine.generate(SHORT, params)
        assert all(0 <= token < REAL for out in outs for token in out.token_ids)
        if temperature == 0:
            for prompt, out in zip(SHORT, outs, strict=True):
                assert out.token_ids == reference.greedy(prompt, 20)[0]


def test_ids_of_padding_rows_are_no_prompt(padded):
    engine = cpu_engine(padded["wide"], None, cudagraph_mode="NONE")
    with engine, pytest.raises(ValueError, match="100"):
        engine.generate([5, 100], greedy(3))


def without_weights(folder):
    for file in Path(folder).glob("*.safetensors"):
        file.write_bytes(b"opened too early")


def test_swapped_tokens_are_refused_before_weights_load(tmp_path, padded):
    """C20a: same size, two strings exchanged; neither model's weights can be read here."""
    target = shutil.copytree(padded["wide"], tmp_path / "target")
    draft = shutil.copytree(padded["wide"], tmp_path / "draft")
    write_tokenizer(draft, "words", REAL, swap=(7, 8))
    without_weights(target)
    without_weights(draft)
    with pytest.raises(ValueError, match=r"\b7\b") as refusal:
        cpu_engine(str(target), str(draft))
    assert "w7" in str(refusal.value) and "w8" in str(refusal.value)


def test_another_tokenizer_is_refused_before_weights_load(tmp_path, padded):
    """C20b: another size and other strings, from the first id on."""
    draft = make_tiny(tmp_path / "draft", seed=4, vocab=256, tokenizer="bytes")
    without_weights(draft)
    with pytest.raises(ValueError, match=r"(?s)tokeni[sz]er.*\b0\b.*w0|\b0\b.*w0.*tokeni[sz]er"):
        cpu_engine(padded["wide"], str(draft))


def test_a_draft_tokenizer_with_fewer_real_tokens_is_refused(tmp_path, padded):
    """The target's token 99 would be padding to the draft: no padded vocabulary, another one."""
    draft = shutil.copytree(padded["wide"], tmp_path / "draft")
    write_tokenizer(draft, "words", 99)
    with pytest.raises(ValueError, match=r"\b99\b"):
        cpu_engine(padded["wide"], str(draft))


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
def test_the_ends_are_the_targets(tmp_path, models, oracles, mode):
    """C20c: the draft's EOS and BOS stop nothing and add nothing."""
    prompt = PROMPTS[3]
    text, _ = oracles["target"].greedy(prompt, 20)
    end = next(i for i in range(5, 20) if text[i] not in text[:i])
    target = make_tiny(tmp_path / "target", seed=1, eos=text[end], bos=3)
    draft = make_tiny(tmp_path / "draft", seed=1, eos=text[1], bos=4)
    with cpu_engine(str(target), str(draft), 4, cudagraph_mode=mode, **ONE_RUNG) as engine:
        out = engine.generate(prompt, greedy(20))
    assert out.prompt_tokens == len(prompt)
    expect(
        out,
        speculate(
            oracles["target"], oracles["same"], prompt, k=4, max_new_tokens=20, eos=(text[end],)
        ),
    )


def test_a_draft_without_a_tokenizer(tmp_path, padded):
    """C20d: refused by name, or served without loss; never a silent acceptance of 0%."""
    draft = shutil.copytree(padded["noisy"], tmp_path / "draft")
    (draft / "tokenizer.json").unlink()
    (draft / "tokenizer_config.json").unlink()
    reference, proposer = Oracle(padded["wide"], vocab=REAL), Oracle(draft, vocab=REAL)
    try:
        engine = cpu_engine(padded["wide"], str(draft), 4, cudagraph_mode="NONE")
    except ValueError as error:
        assert "tokenizer" in str(error).lower()
        return
    with engine:
        for prompt, out in zip(SHORT, engine.generate(SHORT, greedy(12)), strict=True):
            expect(out, speculate(reference, proposer, prompt, k=4, max_new_tokens=12))


def test_vocabularies_of_other_sizes_without_tokenizers(tmp_path, models):
    """Nothing tells which ids are padding: refused by size, or lossless, never a shape error."""
    draft = resized_vocab(models["target"], tmp_path / "draft", 120)
    try:
        engine = cpu_engine(models["target"], str(draft), 4, cudagraph_mode="NONE")
    except ValueError as error:
        assert "120" in str(error) and "128" in str(error)
        return
    reference = Oracle(models["target"])
    with engine:
        for prompt in PROMPTS:
            ids = engine.generate(prompt, greedy(12)).token_ids
            assert ids == reference.greedy(prompt, 12)[0]


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """C24: (a) no head in the file, (b) a redundant equal head, (c) untied and no head."""
    root = tmp_path_factory.mktemp("tied")
    without = make_tiny(root / "without", seed=6, tie=True)
    redundant = Path(shutil.copytree(without, root / "redundant"))
    tensors = load_file(redundant / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, redundant / "model.safetensors", metadata={"format": "pt"})
    missing = Path(shutil.copytree(without, root / "missing"))
    config = json.loads((missing / "config.json").read_text())
    (missing / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return {"without": str(without), "redundant": str(redundant), "missing": str(missing)}


@pytest.mark.parametrize("target", ["without", "redundant"])
@pytest.mark.parametrize("draft", ["without", "redundant"])
def test_tied_heads(tied, target, draft):
    """A head that is left random would accept nothing as a draft and write junk as a target."""
    reference = Oracle(tied["without"])
    with cpu_engine(tied[target], tied[draft], 3, **ONE_RUNG) as engine:
        for prompt, out in zip(PROMPTS, engine.generate(PROMPTS, greedy(15)), strict=True):
            expect(out, speculate(reference, reference, prompt, k=3, max_new_tokens=15))


@pytest.mark.parametrize("role", ["model", "draft"])
def test_an_untied_model_without_its_head_is_refused(tied, role):
    pair = (tied["missing"], None) if role == "model" else (tied["without"], tied["missing"])
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        cpu_engine(*pair)


def test_target_and_draft_keep_their_own_rope_and_norm(tmp_path, models, oracles):
    """C20's cousin: nothing of the target's config may leak into the draft's forward."""
    draft = make_tiny(tmp_path / "draft", seed=1, rope_theta=500.0, rms_norm_eps=1e-2, layers=2)
    proposer = Oracle(draft)
    with cpu_engine(models["target"], str(draft), 3, **ONE_RUNG) as engine:
        for prompt, out in zip(PROMPTS, engine.generate(PROMPTS, greedy(15)), strict=True):
            expected = speculate(oracles["target"], proposer, prompt, k=3, max_new_tokens=15)
            expect(out, expected)


def test_a_draft_without_a_tensor_is_refused_before_the_target_loads(models, tmp_path, monkeypatch):
    from safetensors.torch import load_file, save_file

    draft = tmp_path / "draft"
    shutil.copytree(models["blend.1"], draft)
    tensors = load_file(draft / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, draft / "model.safetensors")
    monkeypatch.setattr(
        "specdec.sources.load_any_model", lambda *args, **kwargs: pytest.fail("loaded")
    )
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        cpu_engine(models["target"], str(draft))
