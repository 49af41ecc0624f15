"""Options that several commands have, and the values that are written in them."""

import json
from typing import Annotated, Any

import typer

DEFAULT_MODE = "FULL_AND_PIECEWISE"

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="A Hugging Face folder or hub id, or a .gguf file. "
        "Default: the bundled SmolLM2-135M-Instruct.",
        show_default=False,
    ),
]
DraftOption = Annotated[
    str,
    typer.Option(
        help="none, auto, ngram, suffix, layer_skip:N, eagle:PATH, medusa:PATH, mtp, a "
        "draft model of the same tokenizer, or ngram+ or suffix+ before one of the last five.",
    ),
]
KOption = Annotated[
    str,
    typer.Option(
        "--k",
        metavar="N|auto",
        help="Drafts per step; auto takes what pays at the moment, down to 0.",
    ),
]
StepsOption = Annotated[
    str,
    typer.Option(
        "--steps-per-replay",
        metavar="N|auto",
        help="Decode steps in one replay of a graph, 1 to 8. Tokens of a stream then come up to "
        "that many steps at once; auto keeps to 1 for streams.",
    ),
]
DtypeOption = Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
RanksOption = Annotated[
    int, typer.Option("--tensor-parallel-size", help="GPUs that hold the model together.")
]
ModeOption = Annotated[
    str,
    typer.Option(help="NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE."),
]
CompilationOption = Annotated[
    str | None,
    typer.Option(
        "--compilation-config",
        metavar="JSON",
        help='As in vLLM: \'{"mode": 3, "compile_sizes": [8]}\'.',
        show_default=False,
    ),
]
AttentionOption = Annotated[str, typer.Option(help="auto, or a backend's name.")]
LoraOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=PATH", help="An adapter in PEFT's format. May be repeated."),
]
MaxNumSeqsOption = Annotated[
    int | None,
    typer.Option(help="Texts that run at once.", show_default="8 on the CPU, 64 on a GPU"),
]
MaxModelLenOption = Annotated[
    int | None, typer.Option(help="Longest text.", show_default="the model's context")
]
NumKvBlocksOption = Annotated[
    int | None, typer.Option(help="Blocks of the KV pool.", show_default="what memory allows")
]
ChatTemplateOption = Annotated[bool, typer.Option(help="Apply an instruct model's chat template.")]
EngineOptions = Annotated[
    str | None,
    typer.Option(
        "--engine-options",
        metavar="JSON",
        help='Further fields of the engine: \'{"extra_k": [2], "exact": true}\'.',
        show_default=False,
    ),
]


def draft_of(name: str) -> str | None:
    """The value of --draft."""
    return None if name.lower() == "none" else name


def draft_width(text: str) -> int | str:
    """The value of --k. Raises ValueError for what is neither a number nor "auto"."""
    return _number_or_auto("--k", text)


def steps_per_replay(text: str) -> int | str:
    """The value of --steps-per-replay. Raises ValueError likewise."""
    return _number_or_auto("--steps-per-replay", text)


def _number_or_auto(option: str, text: str) -> int | str:
    if text != "auto" and not text.isdecimal():
        raise ValueError(f"{option} must be a number or auto, got {text!r}")
    return text if text == "auto" else int(text)


def json_object(option: str, text: str | None) -> dict[str, Any] | None:
    """The value of an option that takes JSON. Raises ValueError where it is no object."""
    if text is None:
        return None
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{option} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{option} must be a JSON object, not {text}")
    return values


def sizes(option: str, text: str | None) -> list[int] | None:
    """Numbers with commas between them. Raises ValueError for anything else."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{option} must be numbers with commas between them, got {text!r}")
    return [int(part) for part in parts]


def named_paths(option: str, given: list[str] | None) -> dict[str, str]:
    """NAME=PATH options. Raises ValueError naming the option."""
    paths: dict[str, str] = {}
    for each in given or ():
        name, equals, path = each.partition("=")
        if not (name and equals and path):
            raise ValueError(f"{option} must be NAME=PATH, got {each!r}")
        if name in paths:
            raise ValueError(f"{option}: {name!r} is given twice")
        paths[name] = path
    return paths


def further_options(text: str | None, known: dict[str, Any]) -> dict[str, Any]:
    """The value of --engine-options. Raises ValueError where it is no JSON object."""
    values = json_object("--engine-options", text) or {}
    twice = sorted(set(values) & set(known))
    if twice:
        raise ValueError(f"--engine-options: {', '.join(twice)} have options of their own")
    return values
