"""A training run from its settings to its report."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.tokenizer import Tokenizer, compare_tokenizers, load_tokenizer
from specdec.train.acceptance import measure
from specdec.train.corpus import Corpus, Document
from specdec.train.export import head_config_json
from specdec.train.finetune import DraftModelTraining, check_draft
from specdec.train.head import HeadConfig
from specdec.train.head_training import HeadTraining
from specdec.train.loop import Clock, Trainee, TrainingLoop
from specdec.train.prompts import Prompt, read_prompts
from specdec.train.report import environment, plot_report, show_report, write_report
from specdec.train.rows import PackedRows
from specdec.train.settings import SHARD_DOCUMENTS, TrainSettings
from specdec.train.target import FrozenTarget, check_layers, default_layers, load_target
from specdec.train.tasks import Shelf
from specdec.train.template import ChatPieces, chat_pieces
from specdec.train.vocab import count_vocab
from specdec.train.writer import Writer, is_held_out
from specdec.verifier.hub import resolve_model
from specdec.verifier.loading import read_config
from specdec.verifier.models.config import ModelConfig
from specdec.verifier.models.llama import CausalLM

DATA = "data"
# Share of a time limit after which no more text is written.
WRITING_SHARE = 0.5
# Request counts with graphs of their own, up to what runs at once.
REQUEST_COUNTS = (4, 16, 32, 64, 96, 128, 192, 256, 384, 512)
# Tokens of held-out text that acceptance is measured on at most, and the widths it is measured for.
MAX_EVAL_TOKENS = 262_144
EVAL_K = (2, 4, 6)


def train(
    settings: TrainSettings, console: Console, *, resume: bool = False, plot: bool = True
) -> dict[str, Any]:
    """Write text, train, measure, report. What is wrong is refused before anything is loaded."""
    clock = Clock(settings.time_limit)
    source = resolve_model(settings.model)
    config, tokenizer = read_config(source), load_tokenizer(source)
    layers, prompts, pieces = _check(settings, config, tokenizer)
    draft = None if settings.draft is None else _check_pair(settings.draft, config, tokenizer)
    folder = settings.prepare_folder(resume)

    model = load_target(
        settings.model, config, EngineConfig(device=settings.device, dtype=settings.dtype)
    )
    usable = _usable_ids(config, tokenizer)
    model.num_known_ids = usable
    corpus = Corpus(folder / DATA)
    if not corpus.is_done:
        _write_text(corpus, model, tokenizer, pieces, prompts, settings, clock, console)
    documents = corpus.documents()
    kept = [each for each in documents if not is_held_out(each.number)]
    held_out = _held_out(documents, settings.seq_len)
    if not kept or not held_out:
        raise ValueError(
            f"{len(documents)} documents were written, too few to train on and to measure: raise "
            "--tokens or --time-limit"
        )

    target = FrozenTarget(model, layers if draft is None else (), usable)
    ends = set(config.eos_token_ids)
    vocab = count_vocab(
        kept,
        size=settings.draft_vocab,
        vocab_size=config.vocab_size,
        usable=usable,
        always=sorted(ends),
    )
    trainee: Trainee
    if draft is None:
        shape = _head_config(config, settings, layers, len(vocab.ids))
        trainee = HeadTraining(
            shape,
            target,
            vocab,
            num_steps=settings.unroll,
            decay=settings.step_decay,
            seed=settings.seed,
        )
    else:
        trainee = DraftModelTraining(
            draft, target, lora_rank=settings.lora_rank, seed=settings.seed
        )
    rows = PackedRows(kept, settings.seq_len, model.device)
    eval_rows = PackedRows(held_out, settings.seq_len, model.device)
    loop = TrainingLoop(trainee, rows, settings, folder, clock, _num_steps(settings, len(rows)))
    _train(loop, console)

    trainee.reload(folder)
    acceptance = [
        measure(
            trainee,
            eval_rows,
            k,
            ends | ({pieces.user_end} if pieces.user_end is not None else set()),
            rows_per_batch=settings.rows_per_batch,
            out_of_time=lambda: clock.left() < -0.7 * clock.reserve,
        )
        for k in (EVAL_K if draft is not None or settings.unroll > 1 else (1,))
    ]
    num_tokens = sum(len(each.tokens) for each in documents)
    report = write_report(
        folder,
        {
            "settings": asdict(settings),
            "environment": environment(model.device),
            "target": {"layers": list(layers), "dtype": str(model.dtype).removeprefix("torch.")},
            "text": {
                "documents": len(documents),
                "held_out_documents": sum(is_held_out(each.number) for each in documents),
                "tokens": num_tokens,
                "answer_tokens": sum(b - a for each in documents for a, b in each.spans),
                **corpus.summary,
            },
            "draft_vocabulary": {"size": len(vocab.ids), "coverage": vocab.coverage}
            if draft is None
            else None,
            "training": {
                "parameters": sum(p.numel() for p in loop.trainee.parameters()),
                "steps": loop.step,
                "planned_steps": loop.total_steps,
                "epochs": loop.step / loop.order.steps_per_epoch,
                "rows": len(rows),
                "tokens": loop.step * loop.order.rows_per_batch * settings.seq_len,
                "seconds": loop.seconds,
                "last": loop.last,
            },
            "seconds": clock.seconds,
        },
        acceptance,
    )
    show_report(console, report)
    if plot:
        try:
            plot_report(folder, report)
        except ImportError as error:
            console.print(f"no plot: {error}")
    return report


def _check(
    settings: TrainSettings, config: ModelConfig, tokenizer: Tokenizer | None
) -> tuple[tuple[int, ...], list[Prompt], ChatPieces]:
    """What the files can tell: the layers, the prompts and the template's pieces."""
    if settings.seq_len > config.max_position_embeddings:
        raise ValueError(
            f"--seq-len ({settings.seq_len}) is above the model's context "
            f"({config.max_position_embeddings})"
        )
    layers = settings.layers or default_layers(config.num_layers)
    check_layers(layers, config.num_layers)
    if settings.draft is None:
        # What cannot be written to a config.json is found out now, not after the training.
        head_config_json(_head_config(config, settings, layers, 1), torch.bfloat16)
    prompts = []
    if settings.data is not None:
        prompts = read_prompts(settings.data)
        if tokenizer is None:
            raise ValueError("--data: this model has no tokenizer to read prompts with")
    return layers, prompts, chat_pieces(tokenizer, config.bos_token_id)


def _usable_ids(config: ModelConfig, tokenizer: Tokenizer | None) -> int:
    """Ids that the target may write: rows that no token belongs to are padding."""
    rows = config.vocab_size
    return rows if tokenizer is None else min(rows, tokenizer.vocab_size)


def _check_pair(draft: str, config: ModelConfig, tokenizer: Tokenizer | None) -> Path:
    path = check_draft(draft)
    rows = read_config(path).vocab_size
    written = _usable_ids(config, tokenizer)
    if rows < written:
        raise ValueError(
            f"--draft {draft}: its vocab_size is {rows}, and the target writes {written} ids"
        )
    difference = compare_tokenizers(tokenizer, load_tokenizer(path))
    if difference is not None:
        raise ValueError(f"--draft {draft} has another tokenizer than the target: {difference}")
    return path


def _head_config(
    config: ModelConfig, settings: TrainSettings, layers: tuple[int, ...], size: int
) -> HeadConfig:
    return HeadConfig.of(
        config,
        draft_vocab_size=size,
        layers=layers,
        own_head=settings.head == "own",
        parallel=settings.parallel,
    )


def _write_text(
    corpus: Corpus,
    model: CausalLM,
    tokenizer: Tokenizer | None,
    pieces: ChatPieces,
    prompts: list[Prompt],
    settings: TrainSettings,
    clock: Clock,
    console: Console,
) -> None:
    """Let the target write until there are enough tokens or no time is left for it."""
    started = time.perf_counter()
    counts = sorted(
        {min(count, settings.num_seqs) for count in REQUEST_COUNTS} | {settings.num_seqs}
    )
    before = corpus.num_tokens()

    def out_of_time() -> bool:
        return clock.left(WRITING_SHARE) < 0

    engine = Engine(
        model,  # type: ignore[arg-type]
        device=str(model.device),
        max_num_seqs=settings.num_seqs,
        max_model_len=settings.seq_len,
        max_num_batched_tokens=max(2048, settings.num_seqs),
        uniform_request_counts=counts,
    )
    ready = time.perf_counter()
    with engine, _bar(console, "writing", settings.tokens, "tokens") as advance:
        writer = Writer(engine, pieces, tokenizer, settings, prompts)
        advance(before)
        num_tokens = before
        while num_tokens < settings.tokens and not out_of_time():
            number = corpus.num_shards
            earlier = corpus.read(number - 1) if number else []
            documents = _write_shard(
                writer,
                number,
                settings.tokens - num_tokens,
                Shelf.of(earlier, tokenizer),
                out_of_time,
                advance,
            )
            if not documents:
                break
            corpus.append(documents)
            num_tokens += sum(len(each.tokens) for each in documents)
    if model.device.type == "cuda":
        # The engine keeps sums in one order; the products of a backward pass are faster split.
        matmul = torch.backends.cuda.matmul
        matmul.allow_bf16_reduced_precision_reduction = True
        matmul.allow_fp16_reduced_precision_reduction = True
        torch.cuda.empty_cache()
    seconds = time.perf_counter() - ready
    corpus.finish(
        {
            "engine_start_seconds": ready - started,
            "writing_seconds": seconds,
            "written_in_them": corpus.num_tokens() - before,
            "skipped_prompts": writer.num_skipped,
        }
    )


def _write_shard(
    writer: Writer,
    shard: int,
    missing: int,
    shelf: Shelf,
    out_of_time: Any,
    advance: Any,
) -> list[Document]:
    """One file's documents: a full shard, or about as many as the missing tokens need."""
    most = writer.settings.max_user_tokens + writer.settings.max_answer_tokens
    count = min(SHARD_DOCUMENTS, max(2, math.ceil(2 * missing / most)))
    first = shard * SHARD_DOCUMENTS
    plans = [writer.plan(number, shelf) for number in range(first, first + count)]
    writer.write(plans, out_of_time, advance)
    # Without an answer there is nothing to learn from.
    return [plan.document for plan in plans if plan.document.spans]


def _held_out(documents: list[Document], seq_len: int) -> list[Document]:
    found, total = [], 0
    for document in documents:
        if is_held_out(document.number) and total < MAX_EVAL_TOKENS:
            found.append(document)
            total += len(document.tokens)
    return found


def _num_steps(settings: TrainSettings, num_rows: int) -> int:
    if settings.steps is not None:
        return settings.steps
    per_epoch = max(1, num_rows // min(settings.rows_per_batch, num_rows))
    return max(1, round(settings.epochs * per_epoch))


def _train(loop: TrainingLoop, console: Console) -> None:
    with _bar(console, "training", loop.total_steps, "steps") as advance:
        done = 0

        def show(line: dict[str, Any]) -> None:
            nonlocal done
            agreement = " ".join(f"{share:.0%}" for share in line["agreement_by_position"])
            advance(line["step"] - done, f"loss {line['loss']:.3f}, right {agreement}")
            done = line["step"]

        loop.run(show)


@contextmanager
def _bar(console: Console, name: str, total: int, unit: str) -> Iterator[Any]:
    """A progress bar; the value is called with how much was done and perhaps a note."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} {task.fields[unit]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=total, unit=unit, note="")

        def advance(amount: int, note: str = "") -> None:
            progress.update(task, advance=amount, note=note)

        yield advance
