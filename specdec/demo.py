"""The demonstration: a few texts with a drafter, and the same texts without one."""

import platform
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from specdec.api import chat_prompts
from specdec.engine import Engine
from specdec.graph_report import start_up_line
from specdec.outputs import StreamEvent
from specdec.params import SamplingParams
from specdec.tables import graph_table, plain_table, stats_line
from specdec.timed import TimedText, run_timed

# Lookup finds much where an answer repeats its question, and little in free text: one of each.
PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "Correct the spelling and return the whole text: The libary opens at nine in the moring and "
    "closes at six in the evning.",
    "Summarise in one sentence: The old mill at the river had stood empty for thirty years when "
    "the village decided to repair it. Last month the wheel turned for the first time, and the "
    "mill now grinds flour on two days of the week.",
)
DRAFT = "ngram"
K = 4
MODEL_NOTE = "SmolLM2-135M-Instruct, dequantised from its Q4_1 file (not the original weights)"


def run_demo(console: Console, max_new_tokens: int = 48) -> None:
    """Stream each prompt's text with a drafter, then run it again without and compare."""
    console.print(f"Model: {MODEL_NOTE}", highlight=False)
    console.print(f"Drafter: {DRAFT} (prompt lookup), k={K}; greedy\n", highlight=False)
    # One request at a time needs the graphs of one request only.
    with Engine(draft=DRAFT, k=K, max_num_seqs=1) as engine:
        drafted = [_stream(console, engine, prompt, max_new_tokens) for prompt in PROMPTS]
        rows, modes = engine.graph_table(), engine.stats().steps_by_mode
        start_up = start_up_line(rows, engine.capture_seconds)
        device = engine.config.torch_device
    console.print("The same prompts without a drafter ...\n")
    with Engine(draft=None, max_num_seqs=1) as engine:
        plain = [_run(engine, prompt, max_new_tokens) for prompt in PROMPTS]

    console.print(comparison(drafted, plain))
    steps = ", ".join(f"{mode} {count}" for mode, count in modes.items() if count)
    console.print(f"Launches by graph mode, prefills included: {steps}\n", highlight=False)
    console.print(graph_table(rows, title="Graphs of the run with a drafter"))
    console.print(f"\n{start_up}", highlight=False, soft_wrap=True)
    if device.type == "cpu":
        console.print(
            f"\nThis ran on a CPU ({platform.machine()}), where scoring five tokens costs about "
            "twice as much as scoring one: it shows how many drafts are accepted and that the "
            "text stays the same. The speed is for a GPU, where one step costs about the same "
            "for one token and for five.",
            highlight=False,
        )


def _stream(console: Console, engine: Engine, prompt: str, max_new_tokens: int) -> TimedText:
    console.print(f"[bold]> {prompt}[/bold]", highlight=False)

    def show(_: int, event: StreamEvent) -> None:
        console.print(event.text, end="", markup=False, highlight=False, soft_wrap=True)

    result = _run(engine, prompt, max_new_tokens, show)
    line = stats_line(result.stats, len(result.token_ids), result.last_token)
    console.print(f"\n[dim]{line}[/dim]\n", highlight=False)
    return result


def _run(
    engine: Engine,
    prompt: str,
    max_new_tokens: int,
    on_event: Callable[[int, StreamEvent], None] | None = None,
) -> TimedText:
    params = SamplingParams(max_new_tokens=max_new_tokens)
    (result,) = run_timed(engine, [chat_prompts(engine, prompt)], [params], on_event)
    return result


def comparison(drafted: Sequence[TimedText], plain: Sequence[TimedText]) -> Table:
    """What speculation did to each prompt and to all of them, beside the run without it."""
    counts = ["tokens", "steps", "drafted", "accepted", "per step"]
    speeds = ["tokens/s", "without", "ratio", "same text"]
    table = plain_table("With a drafter against without", ["prompt"], counts + speeds, dense=True)
    for number, (one, other) in enumerate(zip(drafted, plain, strict=True), start=1):
        _add_row(table, str(number), [one], [other])
    table.add_section()
    _add_row(table, "all", drafted, plain)
    return table


def _add_row(
    table: Table, name: str, drafted: Sequence[TimedText], plain: Sequence[TimedText]
) -> None:
    steps = sum(text.stats.steps for text in drafted)
    speed, plain_speed = _tokens_per_second(drafted), _tokens_per_second(plain)
    same = all(a.token_ids == b.token_ids for a, b in zip(drafted, plain, strict=True))
    table.add_row(
        name,
        str(sum(len(text.token_ids) for text in drafted)),
        str(steps),
        str(sum(text.stats.drafted for text in drafted)),
        str(sum(text.stats.accepted for text in drafted)),
        f"{sum(text.stats.committed_by_steps for text in drafted) / max(steps, 1):.2f}",
        f"{speed:.1f}",
        f"{plain_speed:.1f}",
        f"{speed / plain_speed:.2f}x",
        "yes" if same else "[bold red]NO[/bold red]",
    )


def _tokens_per_second(texts: Sequence[TimedText]) -> float:
    return sum(len(text.token_ids) for text in texts) / sum(text.last_token for text in texts)
