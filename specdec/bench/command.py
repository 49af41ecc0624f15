"""The benchmark as a command: ``specdec bench`` and ``bench/acceptance_vs_latency.py``."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from specdec.bench.report import Report


def bench(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A Hugging Face folder or hub id, or a .gguf file. "
            "Default: the bundled SmolLM2-135M-Instruct.",
            show_default=False,
        ),
    ] = None,
    model_option: Annotated[
        str | None, typer.Option("--model", help="The same as MODEL.", show_default=False)
    ] = None,
    out: Annotated[str, typer.Option(help="Folder for the JSON file and the plot.")] = "bench-out",
    draft: Annotated[
        str, typer.Option(help="none, ngram, layer_skip:N, or a draft model of the same tokenizer.")
    ] = "ngram",
    ks: Annotated[
        str, typer.Option("--k", help="Drafts per step: a list 0,2,4 or a range 0..8.")
    ] = "0..8",
    num_reqs: Annotated[
        str | None,
        typer.Option(
            help="Requests side by side: a list or a range.",
            show_default="1; 3 on the CPU, where that saves time",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="JSON lines of {id, category, turns}. Default: the package's 24 prompts.",
            show_default=False,
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            help="Prompts, taken from the categories in turn.", show_default="all; 6 on the CPU"
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of each text at most.", show_default="128; 24 on the CPU"),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the likeliest tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens of this mass.")] = 1.0,
    seed: Annotated[int, typer.Option(help="With a temperature: prompt i has seed + i.")] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Run every text to its last token.")
    ] = False,
    chat_template: Annotated[
        bool, typer.Option(help="Apply an instruct model's chat template.")
    ] = True,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    cudagraph_mode: Annotated[
        str, typer.Option(help="NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE.")
    ] = "FULL_AND_PIECEWISE",
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest text.", show_default="the model's context")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="What the report calls the model.", show_default=False),
    ] = None,
    commit: Annotated[
        str | None,
        typer.Option(help="The commit that the report names.", show_default="ask git"),
    ] = None,
) -> None:
    """Measure acceptance against latency for every k, beside plain decoding (k=0)."""
    if model is not None and model_option is not None:
        raise ValueError("--model and MODEL are the same; give one of them")
    numbers = {"--k": parse_numbers("--k", ks)}
    if num_reqs is not None:
        numbers["--num-reqs"] = parse_numbers("--num-reqs", num_reqs)

    from specdec.bench.sweep import Settings, run_sweep
    from specdec.config import EngineConfig

    on_cpu = EngineConfig(device=device).torch_device.type == "cpu"
    settings = Settings(
        model=model if model is not None else model_option,
        name=name,
        draft=None if draft.lower() == "none" else draft,
        ks=numbers["--k"] if draft.lower() != "none" else (0,),
        num_reqs=numbers.get("--num-reqs", (3,) if on_cpu else (1,)),
        prompts=prompts,
        num_prompts=num_prompts if num_prompts is not None or not on_cpu else 6,
        max_new_tokens=max_new_tokens or (24 if on_cpu else 128),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        ignore_eos=ignore_eos,
        chat_template=chat_template,
        dtype=dtype,
        device=device,
        cudagraph_mode=cudagraph_mode,
        max_model_len=max_model_len,
    )
    report = run_sweep(
        settings, commit=commit, progress=lambda line: print(line, file=sys.stderr, flush=True)
    )
    show(report)
    save(report, out)


def parse_numbers(name: str, text: str) -> tuple[int, ...]:
    """``0..8`` or ``1,3,8`` as numbers. Raises ValueError naming the option."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        if not first.strip().isdecimal() or (dots and not last.strip().isdecimal()):
            raise ValueError(f"{name} must be a list like 0,2,4 or a range like 0..8, got {text!r}")
        numbers += range(int(first), int(last if dots else first) + 1)
    return tuple(sorted(set(numbers)))


def show(report: "Report") -> None:
    """Print the report's tables."""
    from rich.console import Console

    from specdec.bench.report import (
        caption,
        category_table,
        latency_tables,
        position_table,
        startup_line,
    )

    console = Console()
    console.print(f"\n{caption(report)}\n", highlight=False, soft_wrap=True)
    for table in latency_tables(report):
        console.print(table)
    console.print(
        "tok/s and ms/tok (median, p95) are what one user sees after the first token; total is "
        "tokens/s over all requests, prefills included; TTFT in ms; FULL: decode steps that "
        "replayed a FULL graph; same: texts equal to those of k=0.\n",
        highlight=False,
    )
    if report["settings"]["draft"] is not None:
        console.print(position_table(report))
        console.print(category_table(report))
    console.print(startup_line(report), highlight=False, soft_wrap=True)
    if report["device"]["type"] == "cpu":
        console.print(
            "On a CPU scoring more tokens costs more time: read the acceptance here, and the "
            "speed on a GPU.",
            highlight=False,
        )


def save(report: "Report", folder: str) -> None:
    """Write the JSON file, and beside it the plot where matplotlib is there."""
    from specdec.bench.plot import plot_report
    from specdec.bench.report import write_report

    path = write_report(report, folder)
    print(f"wrote {path}")
    try:
        plot_report(report, path.with_suffix(".png"))
    except ImportError as error:
        print(f"no plot: {error}", file=sys.stderr)
    else:
        print(f"wrote {path.with_suffix('.png')}")
