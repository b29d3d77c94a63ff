"""The picture of a run: how many tickets got which label."""

import base64
from pathlib import Path

PICTURE = "labels.png"
MOST_LABELS = 40


def draw_labels(counts: dict[str, int], path: Path) -> None:
    """Write a bar chart of tickets a label, most frequent first, as PNG."""
    from matplotlib.figure import Figure

    ordered = sorted(counts.items(), key=lambda item: -item[1])[:MOST_LABELS]
    figure = Figure(figsize=(7, 0.6 + 0.28 * len(ordered)), layout="constrained")
    axis = figure.add_subplot()
    bars = axis.barh([name for name, _ in ordered], [count for _, count in ordered], color="#4472a8")
    axis.bar_label(bars, padding=3, fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.set_xlabel("tickets")
    figure.savefig(path, dpi=80)


def as_markdown(path: Path) -> str:
    """The picture inside markdown, with nothing to fetch."""
    data = base64.b64encode(path.read_bytes()).decode()
    return f"![Tickets a label](data:image/png;base64,{data})"
