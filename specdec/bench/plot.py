"""The plot of a report: what is accepted and what is gained, against k."""

from pathlib import Path

from specdec.bench.report import Report, caption, draft_label, points_by_num_reqs


def plot_report(report: Report, path: Path) -> None:
    """Write a PNG. Raises ImportError where matplotlib is not installed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = points_by_num_reqs(report)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    figure.suptitle(caption(report), fontsize=9, wrap=True)

    # What is accepted does not depend on how many requests run side by side.
    points = next(iter(groups.values()))
    ks = [point["k"] for point in points]
    left.plot(ks, [p["mean_tokens_per_step"] for p in points], "o-", label="tokens per step")
    left.plot(ks, [1 + k for k in ks], ":", color="0.6", label="all drafts accepted")
    left.set_ylim(0, 1.25 * max(p["mean_tokens_per_step"] for p in points) + 0.5)
    left.set_ylabel("tokens per step")
    rates = left.twinx()
    drafted = [point for point in points if point["drafted"]]
    rates.plot(
        [p["k"] for p in drafted],
        [p["acceptance_rate"] for p in drafted],
        "s--",
        color="tab:orange",
        label="share of drafts accepted",
    )
    rates.set_ylim(0, 1)
    rates.set_ylabel("share of drafts accepted")
    lines = left.get_lines() + rates.get_lines()
    left.legend(lines, [str(line.get_label()) for line in lines], loc="upper right", fontsize=8)
    left.set_title(f"Acceptance of {draft_label(report)}", fontsize=10)

    for num_reqs, group in groups.items():
        label = f"{num_reqs} request{'' if num_reqs == 1 else 's'}"
        right.plot([p["k"] for p in group], [p["speedup"] for p in group], "o-", label=label)
    right.axhline(1, color="0.6", linestyle=":")
    right.set_ylim(bottom=0)
    right.set_ylabel("tokens/s per user against k=0")
    right.legend(fontsize=8)
    right.set_title("Speed against plain decoding (below 1 is slower)", fontsize=10)
    for axis in (left, right):
        axis.set_xlabel("k, drafts per step")
        axis.set_xticks(ks)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
