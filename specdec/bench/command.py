"""The benchmark as a command: ``specdec bench`` and ``bench/acceptance_vs_latency.py``."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specdec.options import (
    DEFAULT_MODE,
    ChatTemplateOption,
    DeviceOption,
    DtypeOption,
    MaxModelLenOption,
    ModelArgument,
    ModeOption,
    StepsOption,
    draft_of,
    steps_per_replay,
)

PLOTS_NEED = 'they need the extra [bench], that is: pip install "matplotlib>=3.8"'

if TYPE_CHECKING:
    from specdec.bench.report import Report


def bench(
    model: ModelArgument = None,
    model_option: Annotated[
        str | None, typer.Option("--model", help="The same as MODEL.", show_default=False)
    ] = None,
    out: Annotated[str, typer.Option(help="Folder for the JSON file, plots and page.")] = (
        "bench-out"
    ),
    draft: Annotated[
        list[str] | None,
        typer.Option(
            help="none, ngram, suffix, layer_skip:N, eagle:PATH, medusa:PATH, mtp, auto, or a "
            "draft model of the same tokenizer. May be given several times.",
            show_default="ngram",
        ),
    ] = None,
    ks: Annotated[
        str | None,
        typer.Option(
            "--k",
            help="Drafts per step: a list 0,2,4, a range 0..8, auto, or 0..8,auto.",
            show_default="0..8,auto; 0,1,2,4,8 on the CPU",
        ),
    ] = None,
    num_reqs: Annotated[
        str | None,
        typer.Option(
            help="Requests side by side: a list or a range.",
            show_default="1,4,16,64; 1,4 on the CPU",
        ),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            help="Prompts of these lengths in tokens, made from the prompts' texts: a list.",
            show_default="the prompts as they are",
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
            help="Prompts, taken from the categories in turn.", show_default="all; 4 on the CPU"
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of each text at most.", show_default="128; 20 on the CPU"),
    ] = None,
    temperature: Annotated[
        str, typer.Option(help="0 is greedy; a list like 0,0.8 measures both.")
    ] = "0",
    top_k: Annotated[int, typer.Option(help="Keep the likeliest tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens of this mass.")] = 1.0,
    seed: Annotated[int, typer.Option(help="With a temperature: prompt i has seed + i.")] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Run every text to its last token.")
    ] = False,
    chat_template: ChatTemplateOption = True,
    simulate_acceptance: Annotated[
        list[str] | None,
        typer.Option(
            help="What a drafter of this quality would give: a rate like 0.8, or one by position "
            "like 0.9,0.8,0.7 (each if those before were accepted). May be given several times.",
            show_default=False,
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="Another engine on the same weights, prompts and k: transformers, vllm, "
            "flashspec or economize. May be given several times.",
            show_default=False,
        ),
    ] = None,
    warm_up: Annotated[bool, typer.Option(help="Use every graph once before timing.")] = True,
    parts: Annotated[bool, typer.Option(help="Time draft, verify and accept alone.")] = True,
    steps: StepsOption = "auto",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    cudagraph_mode: ModeOption = DEFAULT_MODE,
    max_model_len: MaxModelLenOption = None,
    name: Annotated[
        str | None,
        typer.Option(help="What the report calls the model.", show_default=False),
    ] = None,
    commit: Annotated[
        str | None,
        typer.Option(help="The commit that the report names.", show_default="ask git"),
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(help="Say what changed between two JSON files, and measure nothing."),
    ] = None,
    serve: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Load an OpenAI-compatible server instead, with Poisson arrivals.",
            show_default=False,
        ),
    ] = None,
    rate: Annotated[float, typer.Option(help="With --serve: requests per second.")] = 1.0,
    num_requests: Annotated[int, typer.Option(help="With --serve: requests in all.")] = 32,
) -> None:
    """Measure acceptance against latency for every k, beside plain decoding (k=0)."""
    if model is not None and model_option is not None:
        raise ValueError("--model and MODEL are the same; give one of them")
    if compare is not None:
        return _compare(*compare)
    temperatures = parse_rates("--temperature", temperature)
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out}: no such folder can be made: {error.strerror}") from error
    chosen = model if model is not None else model_option
    if serve is not None:
        from specdec.bench.load import run_load, save_load, show_load

        of_a_sweep = {
            "--draft": draft, "--k": ks, "--num-reqs": num_reqs, "--context": context,
            "--num-prompts": num_prompts, "--simulate-acceptance": simulate_acceptance,
            "--peer": peer, "several values of --temperature": temperatures[1:] or None,
        }  # fmt: skip
        for option, value in of_a_sweep.items():
            if value is not None:
                raise ValueError(f"--serve takes a server as it is, without {option}")
        load = run_load(
            serve,
            model=chosen,
            rate=rate,
            num_requests=num_requests,
            prompts=prompts,
            max_new_tokens=max_new_tokens if max_new_tokens is not None else 128,
            temperature=temperatures[0],
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            ignore_eos=ignore_eos,
            chat=chat_template,
            commit=commit,
        )
        show_load(load)
        save_load(load, out)
        if not load["completed"]:
            raise ConnectionError(f"{serve}: no request was answered: {load['errors'][0]}")
        return
    widths = parse_widths("--k", ks) if ks is not None else None
    counts = parse_numbers("--num-reqs", num_reqs) if num_reqs is not None else None
    contexts = parse_numbers("--context", context) if context is not None else (None,)
    drafts = [draft_of(each) for each in draft or ["ngram"]]
    rates = [parse_rates("--simulate-acceptance", each) for each in simulate_acceptance or ()]

    from specdec.bench.peers import check_peers
    from specdec.bench.settings import Settings
    from specdec.bench.sweep import run_sweep
    from specdec.config import EngineConfig

    for each in drafts:
        check_peers(peer or (), each)
    on_cpu = EngineConfig(device=device).torch_device.type == "cpu"
    if widths is None:
        widths = (0, 1, 2, 4, 8) if on_cpu else (*range(9), "auto")
    if max_new_tokens is None:
        max_new_tokens = 20 if on_cpu else 128
    settings = Settings(
        model=chosen,
        name=name,
        drafts=tuple(drafts),
        ks=widths if drafts != [None] else (0,),
        num_reqs=counts if counts is not None else ((1, 4) if on_cpu else (1, 4, 16, 64)),
        contexts=contexts,
        prompts=prompts,
        num_prompts=num_prompts if num_prompts is not None or not on_cpu else 4,
        max_new_tokens=max_new_tokens,
        temperatures=temperatures,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        ignore_eos=ignore_eos,
        chat_template=chat_template,
        simulate=tuple(rates),
        peers=tuple(peer or ()),
        warm_up=warm_up,
        parts=parts,
        steps_per_replay=steps_per_replay(steps),
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
        between = range(int(first), int(last if dots else first) + 1)
        if not between:
            raise ValueError(f"{name}: a range goes upwards, got {text!r}")
        numbers += between
    return tuple(sorted(set(numbers)))


def parse_widths(name: str, text: str) -> tuple[int | str, ...]:
    """The same, and ``auto`` anywhere among them."""
    parts = [part.strip() for part in text.split(",")]
    rest = [part for part in parts if part != "auto"]
    numbers: tuple[int | str, ...] = parse_numbers(name, ",".join(rest)) if rest else ()
    return (*numbers, "auto") if len(rest) < len(parts) else numbers


def parse_rates(name: str, text: str) -> tuple[float, ...]:
    """``0.8`` or ``0,0.8`` as numbers of at least 0. Raises ValueError naming the option."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"{name} must be a number or a list like 0.9,0.8, got {text!r}") from error
    if not all(0 <= value < float("inf") for value in values):
        raise ValueError(f"{name} must hold numbers of at least 0, got {text!r}")
    return values


def _compare(first: str, second: str) -> None:
    from rich.console import Console

    from specdec.bench.compare import change_table, compare, differences
    from specdec.bench.report import read_report

    one, other = read_report(first), read_report(second)
    changes = compare(one, other)
    console = Console()
    for line in differences(one, other):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    console.print(change_table(changes))
    changed = sum(each.changed for each in changes)
    console.print(f"{changed} of {len(changes)} points changed beyond noise.", highlight=False)


def show(report: "Report") -> None:
    """Print the report's tables."""
    from rich.console import Console

    from specdec.bench import tables
    from specdec.bench.report import caption, differing, repeated_prompts, startup_lines

    console = Console()
    console.print(f"\n{caption(report)}\n", highlight=False, soft_wrap=True)
    for line in differing(report):
        console.print(line, style="bold red", soft_wrap=True, markup=False)
    for line in repeated_prompts(report):
        console.print(line, style="yellow", soft_wrap=True)
    for table in tables.latency_tables(report) + tables.part_tables(report):
        console.print(table)
    console.print(tables.LEGEND + "\n", highlight=False)
    for engine in report["engines"]:
        if engine["crossover"]:
            console.print(tables.crossover_of(engine))
    if report["settings"]["drafts"] != [None] and any(p["drafted"] for p in report["points"]):
        console.print(tables.position_table(report))
        console.print(tables.category_table(report))
    if report["peers"]:
        console.print(tables.peer_table(report))
    for line in startup_lines(report):
        console.print(line, highlight=False, soft_wrap=True)
    if report["device"]["type"] == "cpu":
        console.print(
            "On a CPU scoring more tokens costs more time: read the acceptance here, and the "
            "speed on a GPU.",
            highlight=False,
        )


def save(report: "Report", folder: str) -> None:
    """Write the JSON file and the page, and beside them the plots where matplotlib is there."""
    from specdec.bench.html import html_report
    from specdec.bench.plot import plot_report
    from specdec.bench.report import write_report

    path = write_report(report, folder)
    print(f"wrote {path}")
    plots = {}
    try:
        plots = plot_report(report, path.with_suffix(""))
    except ImportError as error:
        print(f"no plots: {error}; {PLOTS_NEED}", file=sys.stderr)
    for plot in plots.values():
        print(f"wrote {plot}")
    page = path.with_suffix(".html")
    page.write_text(html_report(report, plots), encoding="utf-8")
    print(f"wrote {page}")
