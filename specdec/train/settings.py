"""What a training run is asked for, checked before anything is loaded."""

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from specdec.config import EngineConfig
from specdec.verifier.models.config import read_json_object

SETTINGS_FILE = "settings.json"
HEADS = ("shared", "own")
# Documents of one file on disk: what a killed run has to write again at most.
SHARD_DOCUMENTS = 2048
# A training row keeps at least this much room for an answer.
MIN_ANSWER_TOKENS = 16
# What may differ between a run and its resumption: where and for how long, not what.
FREE_ON_RESUME = ("out", "time_limit", "device", "num_seqs", "save_every")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """Settings of ``specdec train-draft``. A bad value raises ValueError naming the option.

    Attributes:
        model: the target, as for ``Engine``.
        out: folder for the result, the data and the state of the run.
        draft: train this small model on the target's text instead of a new head.
        lora_rank: with ``draft``: train adapters of this rank and merge them. None trains all.
        data: JSON lines with prompts; None lets the target write the prompts too.
        data_share: share of the documents whose prompts come from ``data``.
        rework_share: of the other documents, the share whose prompt holds earlier answers of the
            target, to be summarised, translated, searched or otherwise worked on: long prompts
            whose words come back in the answer.
        task_share: of the same, the share that sets a task about a subject; what is left opens with
            a message that the target writes.
        follow_up_share: share of the conversations that the user goes on with.
        tokens: tokens of text that the target writes at most.
        greedy_share: share of the documents whose answers are greedy throughout; the others open
            with ``opening_tokens`` sampled ones and are greedy from there.
        max_user_tokens, max_answer_tokens: per message. A greedy answer ends sooner where it only
            repeats itself; texts for later prompts may be twice as long.
        num_seqs: requests that the engine runs at once.
        seq_len: tokens of a training row; no document is longer.
        batch_tokens: tokens of a training step, a multiple of ``seq_len``.
        epochs: passes over the text; ``steps`` sets the number of steps instead.
        time_limit: seconds for the whole run, from start to report. None: no limit.
        unroll: positions that a training row drafts, each on the ones before.
        step_decay: weight of each drafted position's loss against the one before.
        lr: peak learning rate. None: 1e-3 for a head, 1e-4 for a draft model, 5e-4 for LoRA.
        layers: the target's layers whose inputs the head reads. None: (2, n//2, n-3).
        draft_vocab: ids that the head can propose: the most frequent of the text.
        head: "shared" takes the target's rows for them, "own" trains a copy.
        parallel: train for drafting all positions in one pass (masked positions).
        save_every: steps between two states on disk.
        seed, dtype, device: as for ``Engine`` and ``SamplingParams``.
    """

    model: str | None = None
    out: str
    draft: str | None = None
    lora_rank: int | None = None
    data: str | None = None
    data_share: float = 1.0
    rework_share: float = 0.4
    task_share: float = 0.3
    follow_up_share: float = 0.35
    tokens: int = 12_000_000
    greedy_share: float = 0.7
    opening_tokens: int = 24
    max_user_tokens: int = 96
    max_answer_tokens: int = 256
    num_seqs: int = 256
    seq_len: int = 1024
    batch_tokens: int = 8192
    epochs: float = 2.5
    steps: int | None = None
    time_limit: float | None = None
    unroll: int = 5
    step_decay: float = 0.8
    lr: float | None = None
    layers: tuple[int, ...] | None = None
    draft_vocab: int = 24576
    head: str = "shared"
    parallel: bool = False
    save_every: int = 500
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in (
            *("tokens", "max_user_tokens", "max_answer_tokens", "num_seqs", "seq_len"),
            *("batch_tokens", "steps", "unroll", "draft_vocab", "save_every", "lora_rank"),
            "opening_tokens",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{_option(name)} must be at least 1, got {value}")
        for name in (
            *("data_share", "rework_share", "task_share", "follow_up_share", "greedy_share"),
        ):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{_option(name)} must be in [0, 1], got {getattr(self, name)}")
        if self.rework_share + self.task_share > 1:
            raise ValueError(
                f"--rework-share ({self.rework_share}) and --task-share ({self.task_share}) add up "
                "to more than 1"
            )
        for name in ("epochs", "time_limit", "lr", "step_decay"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{_option(name)} must be positive, got {value}")
        if self.step_decay > 1:
            raise ValueError(f"--step-decay must be at most 1, got {self.step_decay}")
        if self.head not in HEADS:
            raise ValueError(f"--head must be one of {', '.join(HEADS)}, got {self.head!r}")
        if self.seq_len % 8 or self.seq_len < 4 * MIN_ANSWER_TOKENS:
            raise ValueError(
                f"--seq-len must be a multiple of 8 of at least {4 * MIN_ANSWER_TOKENS}, "
                f"got {self.seq_len}"
            )
        if self.batch_tokens % self.seq_len:
            raise ValueError(
                f"--batch-tokens ({self.batch_tokens}) must be a multiple of --seq-len "
                f"({self.seq_len})"
            )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed must be in 0..2**32 - 1, got {self.seed}")
        EngineConfig(dtype=self.dtype, device=self.device)
        self._check_draft()

    def _check_draft(self) -> None:
        if self.draft is None:
            if self.lora_rank is not None:
                raise ValueError("--lora-rank is for a draft model: give --draft too")
            return
        defaults = {field.name: field.default for field in fields(self)}
        for name in ("layers", "draft_vocab", "head", "parallel"):
            if getattr(self, name) != defaults[name]:
                raise ValueError(f"{_option(name)} is for a draft head and --draft trains a model")

    @property
    def peak_lr(self) -> float:
        if self.lr is not None:
            return self.lr
        if self.draft is None:
            return 1e-3
        return 1e-4 if self.lora_rank is None else 5e-4

    @property
    def rows_per_batch(self) -> int:
        return self.batch_tokens // self.seq_len

    def save(self, folder: Path) -> None:
        text = json.dumps(asdict(self), indent=1)
        (folder / SETTINGS_FILE).write_text(text + "\n", encoding="utf-8")

    def prepare_folder(self, resume: bool) -> Path:
        """The output folder, made or found to hold a run of these settings.

        Raises ValueError where it holds anything and ``resume`` is not asked, or a run of other
        settings, and FileNotFoundError where there is nothing to resume.
        """
        folder = Path(self.out)
        file = folder / SETTINGS_FILE
        if resume:
            if not file.exists():
                raise FileNotFoundError(f"--resume: {folder} holds no run of train-draft")
            self._check_same(read_json_object(file))
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            hint = "; --resume continues the run in it" if file.exists() else ""
            raise ValueError(f"--out {folder} is not an empty folder{hint}")
        folder.mkdir(parents=True, exist_ok=True)
        self.save(folder)
        return folder

    def _check_same(self, saved: dict[str, Any]) -> None:
        for name, value in json.loads(json.dumps(asdict(self))).items():
            if name not in FREE_ON_RESUME and saved.get(name) != value:
                raise ValueError(
                    f"--resume: the run in {self.out} was started with {_option(name)} "
                    f"{saved.get(name)!r}, not {value!r}"
                )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
