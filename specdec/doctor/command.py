"""``specdec doctor``: the command."""

import json
import sys
from typing import Annotated, Any

import typer

from specdec.options import (
    DEFAULT_MODE,
    AttentionOption,
    ChatTemplateOption,
    DeviceOption,
    DraftOption,
    DtypeOption,
    EngineOptions,
    KOption,
    LoraOption,
    MaxModelLenOption,
    MaxNumSeqsOption,
    ModelArgument,
    ModeOption,
    NumKvBlocksOption,
    draft_of,
    draft_width,
    further_options,
    named_paths,
)


def doctor(
    model: ModelArgument = None,
    draft: DraftOption = "auto",
    k: KOption = "4",
    load: Annotated[
        bool,
        typer.Option("--load", help="Build the engine too, and hold it against what files say."),
    ] = False,
    acceptance: Annotated[
        bool,
        typer.Option(
            "--acceptance",
            help="Generate, and compare what is accepted with what teacher forcing predicts.",
        ),
    ] = False,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="JSON lines of {id, category, turns} for --acceptance (which it implies) and "
            "--verify-lossless. Default: the package's 24 prompts.",
            show_default=False,
        ),
    ] = None,
    verify_lossless: Annotated[
        bool,
        typer.Option(
            "--verify-lossless",
            help="Compare texts with drafters and without, over k, arrival, chunks and sampling.",
        ),
    ] = False,
    seconds: Annotated[float, typer.Option(help="Time for --verify-lossless, loading apart.")] = 60,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            help="Prompts, taken from the categories in turn.",
            show_default="all; 6 on the CPU, 3 for --verify-lossless",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of each text at most.", show_default="128; 24 on the CPU"),
    ] = None,
    chat_template: ChatTemplateOption = True,
    json_file: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="FILE", help="Write the report here; - is stdout.", show_default=False
        ),
    ] = None,
    lora: LoraOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    cudagraph_mode: ModeOption = DEFAULT_MODE,
    attention_backend: AttentionOption = "auto",
    max_num_seqs: MaxNumSeqsOption = None,
    max_model_len: MaxModelLenOption = None,
    num_kv_blocks: NumKvBlocksOption = None,
    engine_options: EngineOptions = None,
) -> None:
    """Say what would run and why, whether a drafter fits its model, and what is wrong.

    Without --load, --acceptance or --verify-lossless no weights are loaded. Exit code 1 on a fault.
    """
    from rich.console import Console

    from specdec.doctor.report import show
    from specdec.doctor.run import Settings, run_doctor

    fields: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "cudagraph_mode": cudagraph_mode,
        "attention_backend": attention_backend,
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
        "num_kv_blocks": num_kv_blocks,
        "lora": named_paths("--lora", lora) or None,
    }
    settings = Settings(
        model=model,
        draft=draft_of(draft),
        k=draft_width(k),
        engine=fields | further_options(engine_options, fields),
        load=load,
        acceptance=acceptance or prompts is not None,
        lossless=verify_lossless,
        seconds=seconds,
        prompts=prompts,
        num_prompts=num_prompts,
        max_new_tokens=max_new_tokens,
        chat_template=chat_template,
    )
    report = run_doctor(settings, lambda line: print(f"{line} ...", file=sys.stderr, flush=True))
    if json_file == "-":
        print(json.dumps(report.as_dict(), indent=2, ensure_ascii=False))
    else:
        show(report, Console())
        if json_file is not None:
            report.write(json_file)
    raise typer.Exit(report.exit_code)
