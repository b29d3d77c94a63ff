"""Pictures of the benchmark: what a plan does with the lengths, and how fast each way is."""

import statistics
from pathlib import Path

import matplotlib as mpl
import numpy as np

from benchmarks.report import speedups
from ticket_engine.bucketing import PlanRule, plan_batches

mpl.use("Agg")
import matplotlib.pyplot as plt


def draw_batches(tickets: list[np.ndarray], path: Path, *, batch: int, budget: int) -> None:
    """Ticket lengths, longest first, with the batches of the published scheme and of the packed plan over them."""
    lengths = np.array([len(ids) for ids in tickets])
    plans = (
        (f"sorted batches of {batch}, padded", plan_batches(lengths, PlanRule(True, 2**62, batch_size=batch)), True),
        (f"packed, at most {budget:,} tokens a pass", plan_batches(lengths, PlanRule(False, budget)), False),
    )
    figure, axes = plt.subplots(2, 1, figsize=(10, 6), sharex=True, layout="constrained")
    for axis, (title, starts, padded) in zip(axes, plans, strict=True):
        ends = np.append(starts[1:], len(lengths))
        if padded:
            for start, end in zip(starts, ends, strict=True):
                axis.fill_between([start, end], 0, lengths[start], color="#f2b8a0", step="post", linewidth=0)
        axis.fill_between(np.arange(len(lengths)), 0, lengths, color="#4472a8", step="post", linewidth=0)
        for start in starts:
            axis.axvline(start, color="#222", linewidth=0.4)
        axis.set(title=f"{title}: {len(starts)} passes", ylabel="tokens", xlim=(0, len(lengths)))
    axes[1].set_xlabel("tickets, longest first")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_speed(runs: list[dict], path: Path) -> None:
    """How many times as fast as one by one each row is, a panel a model and work."""
    panels = sorted({(run["model"], run["work"]) for run in runs})
    figure, axes = plt.subplots(len(panels), 1, figsize=(9, 2.4 * len(panels)), layout="constrained", squeeze=False)
    for axis, (model, work) in zip(axes[:, 0], panels, strict=True):
        picked = [run for run in runs if (run["model"], run["work"]) == (model, work)]
        names = list(dict.fromkeys(run["row"] for run in picked))
        formats = list(dict.fromkeys(run["dtype"] for run in picked))
        for offset, dtype in enumerate(formats):
            of_row = {name: [run for run in picked if run["row"] == name and run["dtype"] == dtype] for name in names}
            medians = [statistics.median(speedups(of_row["one by one"], of_row[name])) for name in names]
            places = np.arange(len(names)) + 0.4 * (offset - (len(formats) - 1) / 2)
            bars = axis.barh(places, medians, height=0.36, label=dtype)
            axis.bar_label(bars, fmt="%.2f x", padding=3, fontsize=8)
        axis.set_yticks(np.arange(len(names)), names)
        axis.invert_yaxis()
        axis.set(title=f"{model}, {work}", xlabel="times as fast as one by one (same number format)")
        axis.legend(fontsize=8)
        axis.margins(x=0.12)
    figure.savefig(path, dpi=110)
    plt.close(figure)
