"""Two models' files side by side: each planted difference is named, with both values."""

import json
from pathlib import Path

import pytest
import tokenizers
from tiny import make_tiny, resized_vocab

from specdec.config import EngineConfig
from specdec.doctor.checks import model_checks
from specdec.doctor.pairing import pair_checks
from specdec.doctor.plan import make_plan
from specdec.doctor.subject import read_subject
from specdec.sources import read_source

CPU = EngineConfig(device="cpu")
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
BYTES = {"vocab": 300, "tokenizer": "bytes", "tokenizer_vocab": 270, "eos": 0}


@pytest.fixture
def pair(tmp_path):
    """Two folders that agree in all, as a function that changes the second's files."""
    target = make_tiny(tmp_path / "target", seed=1, chat_template=TEMPLATE, **BYTES)

    def make(chat_template=TEMPLATE, **options):
        draft = make_tiny(
            tmp_path / "draft", seed=2, chat_template=chat_template, **(BYTES | options)
        )
        return target, draft

    return make


def edit(path, **changes):
    content = json.loads(Path(path).read_text())
    Path(path).write_text(json.dumps(content | changes))


def checks_of(target, draft, k=4, **options):
    config = EngineConfig(device="cpu", **options)
    subject = read_subject(read_source(target, config), str(draft), config)
    found = list(pair_checks(subject, make_plan(subject, config, k)))
    assert len({check.name for check in found}) == len(found)
    return {check.name: check for check in found}


def expect_only(checks, name, status, *said):
    """One check complains, and it says all of this; the others are content."""
    assert [n for n, check in checks.items() if check.status != "ok"] == [name]
    assert checks[name].status == status
    for part in said:
        assert part in checks[name].found, checks[name].found
    assert checks[name].todo


def test_a_pair_that_agrees(pair):
    checks = checks_of(*pair())
    assert {check.status for check in checks.values()} == {"ok"}
    assert len(checks) == 9


def test_a_tokenizer_that_differs_in_one_added_token(pair):
    target, draft = pair()
    backend = tokenizers.Tokenizer.from_file(str(draft / "tokenizer.json"))
    backend.add_special_tokens(["<extra>"])
    backend.save(str(draft / "tokenizer.json"))
    checks = checks_of(target, draft)
    expect_only(checks, "tokenizers", "fault", "id 270", "absent in the target", "'<extra>'")


def test_a_template_that_differs(pair):
    checks = checks_of(*pair(chat_template=TEMPLATE.replace("<end>", "</end>")))
    expect_only(checks, "chat templates", "warning", "character 26", "'end><", "'/end><")


def test_a_template_written_otherwise_that_says_the_same(pair):
    checks = checks_of(*pair(chat_template=TEMPLATE.replace("m.role", "m['role']")))
    assert checks["chat templates"].status == "ok"


def test_a_draft_without_a_template(pair):
    expect_only(checks_of(*pair(chat_template=None)), "chat templates", "warning", "draft has none")


def test_other_rope(pair):
    checks = checks_of(*pair(rope_theta=500.0))
    expect_only(checks, "rope", "warning", "theta 10000 in the target, 500 in the draft")


def test_other_dtype(pair):
    import torch

    checks = checks_of(*pair(dtype=torch.float16))
    expect_only(checks, "dtypes", "warning", "float32 and float16", "run in float32 and float32")


def test_other_ends(pair):
    expect_only(checks_of(*pair(eos=[0, 7])), "EOS sets", "warning", "[0] in the target, [0, 7]")


def test_a_shorter_context(pair):
    checks = checks_of(*pair(max_position=64))
    expect_only(checks, "draft context", "warning", "64 tokens", "512")
    assert checks_of(*pair(max_position=64), max_model_len=60)["draft context"].status == "ok"


def test_other_special_tokens(pair):
    target, draft = pair()
    edit(draft / "tokenizer_config.json", eos_token="aa")
    checks = checks_of(target, draft)
    expect_only(checks, "special tokens", "warning", "eos_token is None", "'aa' in the draft")


def test_the_same_strings_split_otherwise(pair):
    """The vocabularies agree, so that nothing is refused; the draft merges two bytes of a word."""
    target, draft = pair()
    path = draft / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["merges"] = [["a", "d"]]
    path.write_text(json.dumps(content))
    checks = checks_of(target, draft)
    expect_only(checks, "tokenizer bytes", "warning", "' leading", "'a', 'd', 'i'", "'ad', 'i'")


def test_the_same_strings_as_other_bytes(pair):
    target, draft = pair()
    edit(draft / "tokenizer.json", decoder=None)
    checks = checks_of(target, draft)
    expect_only(checks, "tokenizer bytes", "warning", "id 0 is the text")


def test_padding_that_differs_passes(pair, tmp_path):
    target, draft = pair()
    wide = resized_vocab(draft, tmp_path / "wide", 320)
    checks = checks_of(target, wide)
    assert {check.status for check in checks.values()} == {"ok"}
    assert "300 rows in the target, 320" in checks["vocabulary padding"].found


def test_lookups_have_nothing_to_compare(pair):
    target, _ = pair()
    (check,) = checks_of(target, "suffix").values()
    assert check.status == "unseen"


@pytest.mark.parametrize(
    ("options", "name", "status", "said"),
    [
        ({"vocab": 260}, "target vocabulary", "fault", "id 260 ('ae')"),
        ({"eos": 299}, "target EOS", "fault", "EOS id 299"),
        ({"eos": None}, "target EOS", "warning", "no end of sequence"),
        ({"tokenizer": None}, "target tokenizer", "warning", "have none"),
    ],
)
def test_one_model_on_its_own(tmp_path, options, name, status, said):
    folder = make_tiny(tmp_path, **(BYTES | options))
    checks = {check.name: check for check in model_checks(read_source(folder, CPU), "target")}
    assert checks[name].status == status
    assert said in checks[name].found


def test_a_turn_that_ends_in_no_end_of_sequence(tmp_path):
    """A chat model whose generation_config.json lacks the token of its template runs on."""
    folder = make_tiny(tmp_path, chat_template=TEMPLATE, **BYTES)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<end>"])
    backend.save(str(folder / "tokenizer.json"))
    checks = {check.name: check for check in model_checks(read_source(folder, CPU), "target")}
    assert checks["target EOS"].status == "warning"
    assert "'<end>' (id 270)" in checks["target EOS"].found
    assert "add 270" in checks["target EOS"].todo


def test_missing_weights(tmp_path):
    folder = make_tiny(tmp_path, **BYTES)
    (folder / "model.safetensors").unlink()
    checks = {check.name: check for check in model_checks(read_source(folder, CPU), "target")}
    assert checks["target weights"].status == "fault"
    assert "model.safetensors" in checks["target weights"].found
