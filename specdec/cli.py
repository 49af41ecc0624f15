"""The command line: ``specdec generate``, ``serve``, ``graphs``, ``bench``, ``doctor``,
``train-draft`` and ``demo``.

Text and JSON go to standard output, everything said about them to standard error. A mistake of
the user's is one line and exit code 2; SPECDEC_DEBUG=1 shows the traceback instead.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from specdec import __version__
from specdec.bench.command import bench
from specdec.doctor.command import doctor
from specdec.options import (
    DEFAULT_MODE,
    ChatTemplateOption,
    CompilationOption,
    DeviceOption,
    DraftOption,
    DtypeOption,
    KOption,
    MaxNumSeqsOption,
    ModelArgument,
    ModeOption,
    RanksOption,
    StepsOption,
    draft_of,
    draft_width,
    json_object,
    sizes,
    steps_per_replay,
)
from specdec.server.command import serve
from specdec.train.command import train_draft

if TYPE_CHECKING:
    from specdec.engine import Engine
    from specdec.outputs import Generation, StreamEvent
    from specdec.params import SamplingParams

USER_ERRORS = (ValueError, TypeError, OSError, NotImplementedError)

app = typer.Typer(
    help="Speculative decoding that leaves the text as it is, on full CUDA graphs.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

NoGraphOption = Annotated[
    bool, typer.Option("--no-graph", help="Run without graphs: --cudagraph-mode NONE.")
]
ADAPTER = "adapter"  # what --lora is called in the engine


def main() -> None:
    """Run the command line, and turn a user's mistake into one line."""
    run(app)


def run(application: typer.Typer) -> None:
    # Read when OpenMP starts, so before torch is imported. On a machine that runs anything else,
    # idle threads that spin instead of sleeping can make a step many times slower.
    for name, value in (("OMP_WAIT_POLICY", "passive"), ("GOMP_SPINCOUNT", "0")):
        os.environ.setdefault(name, value)
    try:
        application()
    except BrokenPipeError:
        # Whoever read the output has seen enough. The interpreter must not flush it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except USER_ERRORS as error:
        if os.environ.get("SPECDEC_DEBUG"):
            raise
        say(f"error: {' '.join(str(error).split())}")
        sys.exit(2)


def say(line: str = "") -> None:
    print(line, file=sys.stderr, flush=True)


def graph_mode(mode: str, no_graph: bool) -> str:
    if not no_graph:
        return mode
    if mode.upper() not in (DEFAULT_MODE, "NONE"):
        raise ValueError(f"--no-graph and --cudagraph-mode {mode} contradict each other")
    return "NONE"


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def generate(
    model: ModelArgument = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="May be given several times. Default: standard input."),
    ] = None,
    draft: DraftOption = "auto",
    k: KOption = "4",
    steps: StepsOption = "auto",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the likeliest tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens of this mass.")] = 1.0,
    seed: Annotated[
        int | None, typer.Option(help="Same seed, same text.", show_default=False)
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Ends a text before it. May be repeated.", show_default=False),
    ] = None,
    lora: Annotated[
        Path | None,
        typer.Option(help="The folder of an adapter in PEFT's format.", show_default=False),
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    tensor_parallel_size: RanksOption = 1,
    cudagraph_mode: ModeOption = DEFAULT_MODE,
    no_graph: NoGraphOption = False,
    compilation: CompilationOption = None,
    chat_template: ChatTemplateOption = True,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Show the text as it comes. Default: on a terminal.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a prompt, one a line.")
    ] = False,
) -> None:
    """Generate text."""
    if stream and as_json:
        raise ValueError("--json and --stream contradict each other")
    texts = read_prompts(prompt)
    mode = graph_mode(cudagraph_mode, no_graph)
    from specdec.api import chat_prompts
    from specdec.engine import Engine
    from specdec.graph_report import start_up_line
    from specdec.params import SamplingParams

    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop or None,
    )
    fields: dict[str, Any] = {
        "steps_per_replay": steps_per_replay(steps),
        "dtype": dtype,
        "device": device,
        "tensor_parallel_size": tensor_parallel_size,
        "cudagraph_mode": mode,
        "compilation_config": json_object("--compilation-config", compilation),
        "lora": {ADAPTER: lora} if lora is not None else None,
    }
    adapter = ADAPTER if lora is not None else None
    with Engine(model, draft_of(draft), draft_width(k), **fields) as engine:
        say(start_up_line(engine.graph_table(), engine.capture_seconds))
        prompts = [chat_prompts(engine, text) if chat_template else text for text in texts]
        if as_json:
            results = engine.generate(prompts, params, lora=adapter)
            assert isinstance(results, list)
            for text, result in zip(texts, results, strict=True):
                print(json.dumps(as_dict(text, result), ensure_ascii=False), flush=True)
        else:
            show = sys.stdout.isatty() if stream is None else stream
            print_texts(engine, prompts, params, adapter, streaming=show)
        if k == "auto":
            show_crossover(engine, sys.stderr)


def read_prompts(given: list[str] | None) -> list[str]:
    if given:
        return given
    text = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read().rstrip("\n")
    if not text:
        raise ValueError("prompt: give --prompt TEXT, or the text on standard input")
    return [text]


def print_texts(
    engine: "Engine",
    prompts: list[Any],
    params: "SamplingParams",
    lora: str | None,
    *,
    streaming: bool,
) -> None:
    """The texts one after the other where they stream, else all at once; a line on each."""
    from specdec.tables import stats_line
    from specdec.timed import run_timed

    def show(_: int, event: "StreamEvent") -> None:
        print(event.text, end="", flush=True)

    batches = [[prompt] for prompt in prompts] if streaming else [prompts]
    for batch in batches:
        started = time.perf_counter()
        each = [params] * len(batch)
        results = run_timed(engine, batch, each, show if streaming else None, lora=lora)
        seconds = time.perf_counter() - started
        for result in results:
            print("" if streaming else result.text, flush=True)
            spent = seconds if streaming else result.last_token
            say(stats_line(result.stats, len(result.token_ids), spent))
            if result.error is not None:
                say(f"the text was ended: {result.error}")


def as_dict(prompt: str, result: "Generation") -> dict[str, Any]:
    stats = result.stats
    names = (
        "steps",
        "drafted",
        "accepted",
        "acceptance_rate",
        "mean_tokens_per_step",
        "drafted_per_step",
        "accepted_per_step",
        "acceptance_by_position",
    )
    return {
        "prompt": prompt,
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "error": result.error,
        "prompt_tokens": result.prompt_tokens,
        "stats": {name: getattr(stats, name) for name in names},
    }


@app.command()
def graphs(
    model: ModelArgument = None,
    draft: DraftOption = "auto",
    k: KOption = "4",
    max_num_seqs: MaxNumSeqsOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    tensor_parallel_size: RanksOption = 1,
    cudagraph_mode: ModeOption = DEFAULT_MODE,
    capture_sizes: Annotated[
        str | None,
        typer.Option(
            "--cudagraph-capture-sizes",
            metavar="N,N,...",
            help="Batch sizes in tokens to capture.",
            show_default=False,
        ),
    ] = None,
    compilation: CompilationOption = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw coverage and padding to this PNG file.", show_default=False),
    ] = None,
) -> None:
    """Capture an engine's graphs and list them."""
    from rich.console import Console

    from specdec.engine import Engine
    from specdec.graph_report import plot_graphs, start_up_line
    from specdec.tables import graph_table

    fields: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "tensor_parallel_size": tensor_parallel_size,
        "cudagraph_mode": cudagraph_mode,
        "compilation_config": json_object("--compilation-config", compilation),
        "cudagraph_capture_sizes": sizes("--cudagraph-capture-sizes", capture_sizes),
        "max_num_seqs": max_num_seqs,
    }
    if plot is not None and not plot.absolute().parent.is_dir():
        raise ValueError(f"--plot {plot}: {plot.absolute().parent} is not a folder")
    with Engine(model, draft_of(draft), draft_width(k), **fields) as engine:
        rows = engine.graph_table()
        console = Console()
        console.print(graph_table(rows))
        line = start_up_line(rows, engine.capture_seconds)
        console.print(f"\n{line}", highlight=False, soft_wrap=True)
        show_crossover(engine, sys.stdout)
        if plot is not None:
            plot_graphs(rows, plot)
            say(f"wrote {plot}")


def show_crossover(engine: "Engine", file: IO[str]) -> None:
    """Which k pays at how many requests, where the engine chooses."""
    from rich.console import Console

    from specdec.tables import crossover_table

    rows = engine.crossover()
    if rows:
        console = Console(file=file)
        console.print()
        console.print(crossover_table(rows))


app.command()(bench)
app.command()(serve)
app.command()(doctor)
app.command("train-draft")(train_draft)


@app.command()
def demo(
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of each text at most.")] = 48,
) -> None:
    """Show real text from the bundled model, with a drafter and without."""
    from rich.console import Console

    from specdec.demo import run_demo

    run_demo(Console(), max_new_tokens)
