"""``specdec doctor`` as a command: what it prints, writes and returns."""

import json
import sys

import pytest
from tiny import make_tiny, write_tokenizer

from specdec import cli

TEMPLATE = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
BYTES = {"vocab": 256, "tokenizer": "bytes", "chat_template": TEMPLATE, "eos": 0}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("doctor")
    target = make_tiny(root / "target", seed=1, **BYTES)
    other = make_tiny(root / "other", seed=1, **BYTES)
    write_tokenizer(other, "bytes", 256, chat_template=TEMPLATE, swap=(40, 41))
    return {"target": str(target), "other": str(other)}


@pytest.fixture
def call(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["specdec", "doctor", *arguments, "--device", "cpu"])
        monkeypatch.setenv("COLUMNS", "400")
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capsys.readouterr()

    return run


def test_files_alone_without_weights(call, models, monkeypatch):
    def refuse(*args, **kwargs):
        pytest.fail("loaded weights")

    monkeypatch.setattr("specdec.sources.load_any_model", refuse)
    code, out, err = call(models["target"], "--draft", models["target"], "--k", "3")
    assert code == 0, err
    for part in (
        "LlamaForCausalLM, 2 layers",
        "float32 on the CPU",
        "sdpa",
        "not triton",
        "k=0 and k=3: 1, 2, 4, 8 requests",
        "all 256 ids are the same strings",
        "0 faults, 0 warnings",
    ):
        assert part in out, part


def test_everything_measured_and_written(call, models, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": i, "category": "a", "turns": [f"Prompt {i}"]} for i in range(3)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    path = tmp_path / "report.json"
    code, out, err = call(
        *(models["target"], "--draft", models["target"], "--prompts", str(prompts), "--load"),
        *("--verify-lossless", "--seconds", "2", "--max-new-tokens", "12", "--json", str(path)),
        *("--max-model-len", "64", "--max-num-seqs", "3", "--cudagraph-mode", "NONE"),
    )
    assert code == 0, out + err
    report = json.loads(path.read_text())
    assert report["exit_code"] == 0 and report["k"] == "4"
    assert report["acceptance"]["prompts"] == 3
    predicted = report["acceptance"]["predicted"]
    assert predicted == report["acceptance"]["measured"]
    assert predicted["acceptance_by_position"] == [1.0] * 4
    assert report["lossless"]["compared"] > 0
    statuses = {check["name"]: check["status"] for check in report["checks"]}
    names = ("tokenizers", "plan", "target's text", "draft KV", "acceptance", "lossless")
    assert {name: statuses[name] for name in names} == dict.fromkeys(names, "ok")
    # A draft as large as its target reads as much for each draft as a plain step does.
    assert statuses["drafter"] == "warning"
    assert "the drafter is good but costly" in " ".join(out.split())


def test_a_fault_is_exit_code_1_with_what_to_do(call, models):
    code, out, _ = call(models["target"], "--draft", models["other"])
    assert code == 1
    assert "id 40 is '(' in the target" in out
    assert "-> take a draft of the target's own family" in out
    assert "1 fault," in out


def test_json_on_standard_output_is_nothing_else(call, models):
    code, out, _ = call(models["target"], "--json", "-")
    report = json.loads(out)
    assert code == report["exit_code"] == 0
    assert report["draft"] == "ngram"
    assert {fact["name"] for fact in report["plan"]} > {"family", "dtype", "attention", "graphs"}


def test_without_a_drafter(call, models):
    code, out, _ = call(models["target"], "--draft", "none", "--acceptance")
    assert code == 0
    assert "without a drafter there is nothing to accept" in out


def test_an_adapter_that_is_not_there_is_a_fault(call, models, tmp_path):
    code, out, _ = call(models["target"], "--lora", f"style={tmp_path}/none")
    assert code == 1
    assert "adapter style" in out and "none" in out


def test_an_unsupported_architecture_is_a_fault(call, tmp_path):
    folder = make_tiny(tmp_path, **BYTES)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["NoSuchForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    code, out, _ = call(str(folder))
    assert code == 1
    assert "NoSuchForCausalLM is not supported" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["no/such/folder"], "no/such/folder"),
        (["MODEL", "--draft", "no/such/draft"], "no/such/draft"),
        (["MODEL", "--prompts", "no-such.jsonl"], "no-such.jsonl"),
        (["MODEL", "--k", "many"], "--k"),
        (["MODEL", "--seconds", "0"], "seconds"),
        (["MODEL", "--dtype", "int7"], "dtype"),
        (["MODEL", "--lora", "nothing"], "--lora"),
        (["MODEL", "--engine-options", '{"simulated_acceptance": 0.5}'], "simulated_acceptance"),
        (["MODEL", "--engine-options", '{"nothing": 1}'], "nothing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_exit_code_2(call, models, arguments, named):
    code, out, err = call(*[models["target"] if a == "MODEL" else a for a in arguments])
    assert code == 2 and out == ""
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert named in line
