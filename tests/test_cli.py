"""The command line: what it prints where, and one line for a mistake."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from adapters import write_adapter
from tiny import make_tiny

import specdec
from specdec import cli

TEMPLATE = "{% for m in messages %}<{{ m.content }}>{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model that reads and writes bytes, with a chat template."""
    folder = tmp_path_factory.mktemp("cli") / "bytes"
    return str(make_tiny(folder, vocab=256, tokenizer="bytes", chat_template=TEMPLATE))


class Output:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run ``specdec`` with these arguments, here, on the CPU."""

    def run(*arguments: str, stdin: str | None = None) -> Output:
        monkeypatch.setattr(sys, "argv", ["specdec", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin) if stdin is not None else None)
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Output(code, *capsys.readouterr())

    return run


def generate(model: str, *options: str) -> list[str]:
    return ["generate", model, "--device", "cpu", "--max-new-tokens", "12", *options]


def test_json_is_one_object_a_prompt_with_the_numbers_of_the_api(call, model: str) -> None:
    output = call(*generate(model, "-p", "one", "-p", "two", "--draft", model, "--json"))
    assert output.code == 0, output.err
    rows = [json.loads(line) for line in output.out.splitlines()]
    assert [row["prompt"] for row in rows] == ["one", "two"]
    expected = specdec.generate(
        ["one", "two"], model=model, draft=model, device="cpu", max_new_tokens=12
    )
    for row, result in zip(rows, expected, strict=True):
        assert row["token_ids"] == result.token_ids
        assert row["text"] == result.text
        assert row["finish_reason"] == result.finish_reason
        assert row["prompt_tokens"] == result.prompt_tokens == len("<one>")
        stats = row["stats"]
        assert stats["drafted_per_step"] == result.stats.drafted_per_step
        assert stats["accepted"] == stats["drafted"] > 0
        assert stats["acceptance_by_position"] == result.stats.acceptance_by_position


def test_streamed_and_plain_output_are_the_text_and_the_counts_go_to_stderr(
    call, model: str
) -> None:
    options = ["-p", "one", "--draft", model]
    text = json.loads(call(*generate(model, *options, "--json")).out)["text"]
    for flag in ("--stream", "--no-stream"):
        output = call(*generate(model, *options, flag))
        assert output.code == 0
        assert output.out == text + "\n"
        assert "12 tokens in" in output.err
        assert "accepted (100%)" in output.err


def test_draft_k_and_graphs_never_change_the_text(call, model: str) -> None:
    plain = call(*generate(model, "-p", "one", "--draft", "none", "--json")).out
    ids = json.loads(plain)["token_ids"]
    for options in (
        ["--draft", "ngram", "--k", "2"],
        ["--draft", "layer_skip:1", "--no-graph"],
        ["--draft", model, "--cudagraph-mode", "FULL_DECODE_ONLY"],
    ):
        output = call(*generate(model, "-p", "one", *options, "--json"))
        assert json.loads(output.out)["token_ids"] == ids, options


def test_a_seed_repeats_and_sampling_options_act(call, model: str) -> None:
    hot = ["-p", "one", "--temperature", "1.5", "--json", "--draft", "none"]

    def ids(*options: str) -> list[int]:
        return json.loads(call(*generate(model, *hot, *options)).out)["token_ids"]

    assert ids("--seed", "7") == ids("--seed", "7") != ids("--seed", "8")
    greedy = json.loads(call(*generate(model, "-p", "one", "--draft", "none", "--json")).out)
    assert ids("--top-k", "1") == greedy["token_ids"]
    assert ids("--top-p", "0.000001") == greedy["token_ids"]


def test_a_stop_string_and_an_adapter(call, model: str, tmp_path) -> None:
    path = str(write_adapter(tmp_path / "adapter", model, seed=1))
    plain, adapted, streamed, stopped = (
        call(*generate(model, "-p", "one", *options)).out
        for options in (["--json"], ["--lora", path, "--json"], ["--lora", path], ["--json"])
    )
    expected = specdec.generate("one", model=model, lora=path, device="cpu", max_new_tokens=12)
    assert json.loads(adapted)["token_ids"] == expected.token_ids
    assert json.loads(plain)["token_ids"] != expected.token_ids
    assert streamed == expected.text + "\n"
    text = json.loads(stopped)["text"]
    stops = ["--stop", text[3:5], "--stop", "never there"]
    stopped = json.loads(call(*generate(model, "-p", "one", *stops, "--json")).out)
    assert stopped["text"] == text[: text.index(text[3:5])]
    assert stopped["finish_reason"] == "stop" and stopped["error"] is None


def test_the_prompt_may_come_from_standard_input(call, model: str) -> None:
    given = call(*generate(model, "-p", "from a pipe", "--json")).out
    piped = call(*generate(model, "--json"), stdin="from a pipe\n").out
    assert json.loads(piped) == json.loads(given)


def test_the_chat_template_can_be_left_out(call, model: str) -> None:
    bare = json.loads(call(*generate(model, "-p", "one", "--no-chat-template", "--json")).out)
    assert bare["prompt_tokens"] == len("one")


def test_graphs_lists_every_captured_graph(call, model: str) -> None:
    output = call("graphs", model, "--device", "cpu", "--k", "3", "--max-num-seqs", "4")
    assert output.code == 0
    lines = [line.split() for line in output.out.splitlines() if " FULL " in line]
    with specdec.Engine(model, "ngram", 3, device="cpu", max_num_seqs=4) as engine:
        rows = engine.graph_table()
    # The last seven words are requests, tokens, memory and its unit, capture and its unit, replays.
    printed = [(line[0], int(line[-7]), int(line[-6])) for line in lines]
    captured = [(row.role, row.descriptor.num_reqs, row.descriptor.num_tokens) for row in rows]
    assert printed == captured
    assert "FULL up to 4 requests at k=0 and k=3" in output.out


def test_auto_shows_which_k_pays(call, model: str) -> None:
    """After the list of graphs, and after texts; not for a fixed k."""
    options = ["--device", "cpu", "--draft", "ngram", "--k", "auto"]
    output = call("graphs", model, *options, "--max-num-seqs", "2")
    assert output.code == 0, output.err
    table = output.out[output.out.index("k=auto:") :]
    assert "best k" in table and "k=4" in table
    output = call(*generate(model, "-p", "one", *options, "--json"))
    assert "best k" in output.err and json.loads(output.out)["text"]
    assert "best k" not in call(*generate(model, "-p", "one", "--draft", "ngram")).err


def test_steps_per_replay_reaches_the_engine_and_changes_no_text(call, model: str) -> None:
    options = ["-p", "one", "--draft", "ngram", "--json"]
    plain = call(*generate(model, *options, "--steps-per-replay", "1"))
    several = call(*generate(model, *options, "--steps-per-replay", "3"))
    assert several.code == 0, several.err
    assert several.out == plain.out
    refused = call(*generate(model, *options, "--steps-per-replay", "9"))
    assert refused.code == 2 and "steps_per_replay must be" in refused.err


def test_graphs_takes_sizes_in_tokens(call, model: str) -> None:
    options = ["--device", "cpu", "--k", "3", "--draft", "ngram", "--max-num-seqs", "4"]
    output = call("graphs", model, *options, "--cudagraph-capture-sizes", "4, 8,16")
    lines = [line.split() for line in output.out.splitlines() if " FULL " in line]
    steps = [int(line[-6]) for line in lines if line[0] == "step" and int(line[-7]) > 0]
    assert output.code == 0 and {4, 8, 16} <= set(steps)
    assert call("graphs", model, "--cudagraph-capture-sizes", "4,x").code == 2


def test_graphs_says_plainly_that_there_is_none(call, model: str) -> None:
    output = call("graphs", model, "--device", "cpu", "--cudagraph-mode", "none")
    assert output.code == 0
    assert "no graphs were captured" in output.out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate", "no/such/folder/x", "-p", "one"], "no/such/folder/x"),
        (["generate", "MODEL", "-p", "one", "--temperature", "-1"], "temperature"),
        (["generate", "MODEL", "-p", "one", "--top-p", "2"], "top_p"),
        (["generate", "MODEL", "-p", "one", "--seed", "-3"], "seed"),
        (["generate", "MODEL", "-p", "one", "--max-new-tokens", "0"], "max_new_tokens"),
        (["generate", "MODEL", "-p", "one", "--k", "-1"], "k must be"),
        (["generate", "MODEL", "-p", "one", "--steps-per-replay", "x"], "--steps-per-replay must"),
        (["bench", "MODEL", "--steps-per-replay", "x"], "--steps-per-replay must"),
        (["generate", "MODEL", "-p", "one", "--draft", "layer_skip:x"], "layer_skip"),
        (["generate", "MODEL", "-p", "one", "--dtype", "int7"], "dtype"),
        (["generate", "MODEL", "-p", "one", "--device", "toaster"], "device"),
        (["generate", "MODEL", "-p", "one", "--cudagraph-mode", "SOME"], "cudagraph_mode"),
        (["generate", "MODEL", "-p", "", "--no-chat-template"], "prompt"),
        (["generate", "MODEL"], "--prompt"),
        (["generate", "MODEL", "-p", "x", "--json", "--stream"], "--json"),
        (
            ["generate", "MODEL", "-p", "x", "--no-graph", "--cudagraph-mode", "FULL"],
            "--no-graph",
        ),
        (["graphs", "no/such/folder/x"], "no/such/folder/x"),
        (["graphs", "MODEL", "--cudagraph-capture-sizes", "4,x"], "--cudagraph-capture-sizes"),
        (["serve", "MODEL", "--compilation-config", "[1]"], "--compilation-config"),
        (["serve", "MODEL", "--compilation-config", '{"mode": 9}'], "mode"),
        (["bench", "MODEL", "--k", "a..b"], "--k"),
        (["bench", "MODEL", "--prompts", "no-such-file.jsonl"], "no-such-file.jsonl"),
        (["bench", "MODEL", "--model", "MODEL"], "--model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_that_names_it(
    call, model: str, arguments: list[str], named: str
) -> None:
    output = call(*[model if word == "MODEL" else word for word in arguments])
    assert output.code == 2
    errors = [line for line in output.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert named in errors[0]
    assert "Traceback" not in output.err
    assert output.out == ""


@pytest.mark.parametrize("arguments", [["generate", "--no-such-option"], ["no-such-command"]])
def test_an_unknown_word_is_refused(call, arguments: list[str]) -> None:
    output = call(*arguments)
    assert output.code == 2
    assert "no-such" in output.err
    assert "Traceback" not in output.err


def test_help_names_every_command_and_loads_no_torch() -> None:
    script = "import sys; from specdec.cli import app; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.strip() == "False", result.stderr
    names = {c.name or c.callback.__name__ for c in cli.app.registered_commands}
    known = {"generate", "graphs", "bench", "demo", "serve", "doctor", "train-draft"}
    assert {"generate", "graphs", "bench", "demo"} <= names <= known


def test_the_module_and_the_entry_point_are_the_same_program(tmp_path: Path) -> None:
    entry = Path(sys.executable).with_name("specdec")
    for command in ([sys.executable, "-m", "specdec"], [str(entry)]):
        result = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, cwd=tmp_path, check=False
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip() == specdec.__version__


def test_the_traceback_is_there_for_whoever_asks(
    call, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_DEBUG", "1")
    with pytest.raises(ValueError, match="top_p"):
        call(*generate(model, "-p", "one", "--top-p", "2"))


def test_idle_threads_sleep_unless_told_otherwise(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    call("--version")
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    assert os.environ["GOMP_SPINCOUNT"] == "5"
