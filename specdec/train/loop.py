"""The training loop: steps, a schedule, states on disk, and a clock that ends it in time."""

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from specdec.train.rows import Batch, BatchOrder, PackedRows
from specdec.train.settings import TrainSettings

STATE = "state.pt"
LOG = "train_log.jsonl"
# The schedule ends at this share of the peak learning rate.
LAST_LR = 0.02
MAX_WARMUP_STEPS = 100
MAX_GRAD_NORM = 1.0
# Steps between two lines of the log; each line waits for the device.
LOG_EVERY = 20
# Share of a time limit that is kept for the last evaluation and the report, and its least seconds.
RESERVE, MIN_RESERVE = 0.06, 10.0


@dataclass(frozen=True, slots=True)
class Losses:
    """Of one batch, all on the device."""

    total: Tensor  # what is minimised
    by_step: Tensor  # [drafted positions] cross entropy in nats
    agreement: Tensor  # [drafted positions] share whose likeliest token is the target's


class Trainee(Protocol):
    """What is trained: it knows its parameters, its loss, and how to draft and to be saved."""

    def prepare(self, batch: Batch) -> None:
        """See the first batch of a new run."""

    def parameters(self) -> list[nn.Parameter]: ...

    def losses(self, batch: Batch) -> Losses: ...

    def proposals(self, batch: Batch, k: int) -> Tensor:
        """Greedy drafts [B, T, k] int64: the chain that has read the tokens up to i + 1 proposes
        ``[:, i, j]`` for token i + 2 + j, if its drafts before j were the text's tokens.
        """

    def state(self) -> dict[str, Tensor]: ...

    def load_state(self, state: dict[str, Tensor]) -> None: ...

    def export(self, folder: Path) -> None:
        """Write what an engine loads."""

    def reload(self, folder: Path) -> None:
        """Take the weights as ``export`` rounded them."""


class Clock:
    """Seconds since the start of the run, and what is left of its limit."""

    def __init__(self, limit: float | None) -> None:
        self.started = time.perf_counter()
        self.limit = limit
        self.reserve = 0.0
        if limit is not None:
            self.reserve = min(max(RESERVE * limit, MIN_RESERVE), 0.3 * limit)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def left(self, share: float = 1.0) -> float:
        """Seconds until this share of the limit, less the reserve at its end, is used up."""
        if self.limit is None:
            return math.inf
        return share * (self.limit - self.reserve) - self.seconds


def learning_rate(peak: float, step: int, warmup: int, progress: float) -> float:
    """Linear warm-up, then a cosine over ``progress`` from 0 to 1."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return peak * min(1.0, (step + 1) / warmup) * (LAST_LR + (1 - LAST_LR) * cosine)


class TrainingLoop:
    """Trains until the last step or until time runs out, and can go on where it was stopped."""

    def __init__(
        self,
        trainee: Trainee,
        rows: PackedRows,
        settings: TrainSettings,
        folder: Path,
        clock: Clock,
        total_steps: int,
    ) -> None:
        self.trainee = trainee
        self.rows = rows
        self.order = BatchOrder(len(rows), settings.rows_per_batch, settings.seed)
        self.settings = settings
        self.folder = folder
        self.clock = clock
        self.total_steps = total_steps
        self.warmup = max(1, min(MAX_WARMUP_STEPS, total_steps // 10))
        self.step = 0
        self.seconds = 0.0  # of training, in this process and those before
        self.progress = 0.0  # of the schedule
        self.last: dict[str, Any] = {}  # the last line of the log
        parameters = trainee.parameters()
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.01},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        on_gpu = any(p.is_cuda for p in parameters)
        self.optimizer = torch.optim.AdamW(
            groups, lr=settings.peak_lr, betas=(0.9, 0.95), fused=on_gpu
        )

    def run(self, on_log: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
        """Train. ``on_log`` gets each line of the log. The result is exported with every state."""
        if (self.folder / STATE).exists():
            self._restore()
        else:
            self.trainee.prepare(self._batch(0))
            (self.folder / LOG).unlink(missing_ok=True)
        started, before = time.perf_counter(), self.seconds
        first, allowed = self.progress, self.clock.left()
        sums: Tensor | None = None
        summed = 0
        while self.step < self.total_steps and self.clock.left() > 0:
            spent = time.perf_counter() - started
            by_time = first + (1 - first) * spent / allowed if math.isfinite(allowed) else 0.0
            self.progress = max(self.step / self.total_steps, by_time)
            lr = learning_rate(self.settings.peak_lr, self.step, self.warmup, self.progress)
            row = self._train_step(lr)
            sums = row if sums is None else sums + row
            summed += 1
            self.step += 1
            saves = self.step % self.settings.save_every == 0
            is_last = self.step == self.total_steps
            if saves or is_last or self.step % LOG_EVERY == 0:
                means = (sums / summed).tolist()
                sums, summed = None, 0
                self.seconds = before + time.perf_counter() - started
                on_log(self._log(lr, means))
            if saves:
                self.save()
        self.seconds = before + time.perf_counter() - started
        self.save()

    def _train_step(self, lr: float) -> Tensor:
        """One step. Its losses by position, then the agreements, on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        losses = self.trainee.losses(self._batch(self.step))
        self.optimizer.zero_grad(set_to_none=True)
        losses.total.backward()
        norm = nn.utils.clip_grad_norm_(self.trainee.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        return torch.cat(
            (losses.total.detach()[None], norm[None], losses.by_step, losses.agreement)
        )

    def _batch(self, step: int) -> Batch:
        return self.rows.batch(self.order.rows(step))

    def _log(self, lr: float, means: list[float]) -> dict[str, Any]:
        total, norm, *rest = means
        if not math.isfinite(total):
            raise RuntimeError(
                f"the loss is {total} before step {self.step}; lower --lr ({self.settings.peak_lr})"
                " and start again, or --resume from the last state"
            )
        half = len(rest) // 2
        line = {
            "step": self.step,
            "lr": lr,
            "loss": total,
            "grad_norm": norm,
            "loss_by_position": rest[:half],
            "agreement_by_position": rest[half:],
            "seconds": round(self.seconds, 3),
        }
        with (self.folder / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.last = line
        return line

    def save(self) -> None:
        """Write the state and the result so far; each file is replaced as a whole."""
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "progress": self.progress,
            "last": self.last,
            "trainee": self.trainee.state(),
            "optimizer": self.optimizer.state_dict(),
        }
        scratch = self.folder / f"{STATE}.tmp"
        torch.save(state, scratch)
        os.replace(scratch, self.folder / STATE)
        self.trainee.export(self.folder)

    def _restore(self) -> None:
        device = self.trainee.parameters()[0].device
        state = torch.load(self.folder / STATE, map_location=device, weights_only=True)
        self.step, self.seconds = state["step"], state["seconds"]
        self.progress, self.last = state["progress"], state["last"]
        self.trainee.load_state(state["trainee"])
        self.optimizer.load_state_dict(state["optimizer"])
        log = self.folder / LOG
        # Lines of steps that were lost with the process are written again.
        text = log.read_text(encoding="utf-8") if log.exists() else ""
        # What follows the last line feed is a line that the process did not finish.
        *lines, _ = text.split("\n")
        kept = [line for line in lines if json.loads(line)["step"] <= self.step]
        log.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def read_log(folder: Path) -> list[dict[str, Any]]:
    path = folder / LOG
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
