"""``specdec train-draft``: the command."""

from typing import Annotated

import typer


def train_draft(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="The target: a Hugging Face folder or hub id, or a .gguf file. "
            "Default: the bundled SmolLM2-135M-Instruct.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        str, typer.Option(help="Folder for the result, the text and the state of the run.")
    ] = "",
    draft: Annotated[
        str | None,
        typer.Option(help="Train this small model instead of a new head.", show_default=False),
    ] = None,
    lora_rank: Annotated[
        int | None,
        typer.Option(help="With --draft: train adapters of this rank.", show_default="all weights"),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="JSON lines of prompts (prompt, question, turns or messages); the answers are "
            "always the target's own. Default: the target writes the prompts too.",
            show_default=False,
        ),
    ] = None,
    data_share: Annotated[
        float, typer.Option(help="With --data: share of the documents that take it.")
    ] = 1.0,
    rework_share: Annotated[
        float, typer.Option(help="Share of the rest whose prompts hold earlier answers.")
    ] = 0.4,
    task_share: Annotated[
        float, typer.Option(help="Share of the rest that sets a task about a subject.")
    ] = 0.3,
    follow_up_share: Annotated[
        float, typer.Option(help="Share of the conversations with further turns.")
    ] = 0.35,
    tokens: Annotated[int, typer.Option(help="Tokens of text to write at most.")] = 12_000_000,
    greedy_share: Annotated[
        float, typer.Option(help="Share of the documents with greedy answers throughout.")
    ] = 0.7,
    max_user_tokens: Annotated[int, typer.Option(help="Longest user message.")] = 96,
    max_answer_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    num_seqs: Annotated[int, typer.Option(help="Requests that run at once.")] = 256,
    seq_len: Annotated[int, typer.Option(help="Tokens of a training row.")] = 1024,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a training step.")] = 8192,
    epochs: Annotated[float, typer.Option(help="Passes over the text.")] = 2.5,
    steps: Annotated[
        int | None, typer.Option(help="Training steps, instead of epochs.", show_default=False)
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(help="Seconds for the whole run, report included.", show_default="none"),
    ] = None,
    unroll: Annotated[int, typer.Option(help="Drafted positions that the loss unrolls.")] = 5,
    step_decay: Annotated[
        float, typer.Option(help="Weight of a position's loss against the one before.")
    ] = 0.8,
    lr: Annotated[
        float | None,
        typer.Option(help="Peak learning rate.", show_default="1e-3; 1e-4 draft; 5e-4 LoRA"),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(help="Layers whose inputs the head reads.", show_default="2,n/2,n-3"),
    ] = None,
    draft_vocab: Annotated[int, typer.Option(help="Ids that the head can propose.")] = 24576,
    head: Annotated[
        str, typer.Option(help="shared: the target's rows, nothing to save; own: a trained copy.")
    ] = "shared",
    parallel: Annotated[
        bool, typer.Option("--parallel", help="Train for drafting all positions in one pass.")
    ] = False,
    save_every: Annotated[int, typer.Option(help="Steps between two saved states.")] = 500,
    seed: Annotated[int, typer.Option(help="Of the text, the weights and the order.")] = 0,
    dtype: Annotated[str, typer.Option(help="The target's: auto, float32, ...")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    plot: Annotated[bool, typer.Option(help="Draw the report, where matplotlib is.")] = True,
) -> None:
    """Train a draft head for a model, or a draft model, on text that the model writes itself."""
    if not out:
        raise ValueError("--out: give a folder for the result")
    from rich.console import Console

    from specdec.train.run import train
    from specdec.train.settings import TrainSettings

    settings = TrainSettings(
        model=model,
        out=out,
        draft=draft,
        lora_rank=lora_rank,
        data=data,
        data_share=data_share,
        rework_share=rework_share,
        task_share=task_share,
        follow_up_share=follow_up_share,
        tokens=tokens,
        greedy_share=greedy_share,
        max_user_tokens=max_user_tokens,
        max_answer_tokens=max_answer_tokens,
        num_seqs=num_seqs,
        seq_len=seq_len,
        batch_tokens=batch_tokens,
        epochs=epochs,
        steps=steps,
        time_limit=time_limit,
        unroll=unroll,
        step_decay=step_decay,
        lr=lr,
        layers=None if layers is None else parse_layers(layers),
        draft_vocab=draft_vocab,
        head=head,
        parallel=parallel,
        save_every=save_every,
        seed=seed,
        dtype=dtype,
        device=device,
    )
    train(settings, Console(stderr=True), resume=resume, plot=plot)
    print(out)


def parse_layers(text: str) -> tuple[int, ...]:
    """``2,15,27`` as numbers. Raises ValueError naming the option."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"--layers must be three numbers like 2,15,27, got {text!r}")
    return tuple(map(int, parts))
