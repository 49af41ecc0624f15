"""What a training run came to: a JSON file, a table for the terminal, and a plot."""

import json
import platform
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from specdec.tables import plain_table
from specdec.train.acceptance import HOW, Acceptance
from specdec.train.loop import read_log

REPORT = "train_report.json"
PLOT = "train_report.png"


def environment(device: torch.device) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        "device_type": device.type,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
    }


def write_report(
    folder: Path, content: dict[str, Any], acceptance: list[Acceptance]
) -> dict[str, Any]:
    """Write ``train_report.json`` and return what it holds."""
    report = {
        "schema_version": 1,
        **content,
        "acceptance": {"how": HOW, "held_out": [each.as_dict() for each in acceptance]},
    }
    text = json.dumps(report, indent=1, ensure_ascii=False)
    (folder / REPORT).write_text(text + "\n", encoding="utf-8")
    return report


def show_report(console: Console, report: dict[str, Any]) -> None:
    held_out = report["acceptance"]["held_out"]
    width = max((each["k"] for each in held_out), default=0)
    positions = [str(i + 1) for i in range(width)]
    table = plain_table(
        "Held-out text, greedy: share of the drafts accepted by position",
        [],
        ["k", "tok/step", *positions],
    )
    for each in held_out:
        shares = [f"{share:.0%}" for share in each["by_position"]]
        table.add_row(str(each["k"]), f"{each['mean_tokens_per_step']:.2f}", *shares)
    console.print(table)


def plot_report(folder: Path, report: dict[str, Any]) -> Path:
    """Losses by step and acceptance by position. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    log = read_log(folder)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    steps = [line["step"] for line in log]
    for i in range(len(log[0]["loss_by_position"]) if log else 0):
        left.plot(steps, [line["loss_by_position"][i] for line in log], label=f"draft {i + 1}")
    left.set_xlabel("step")
    left.set_ylabel("cross entropy, nats")
    left.legend(fontsize=8)
    for each in report["acceptance"]["held_out"]:
        places = range(1, each["k"] + 1)
        label = f"k={each['k']}: {each['mean_tokens_per_step']:.2f} tokens a step"
        right.plot(places, each["by_position"], "o-", label=label)
    right.set_xlabel("position in the draft")
    right.set_ylabel("accepted, held-out text")
    right.set_ylim(0, 1)
    right.legend(fontsize=8)
    path = folder / PLOT
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
