"""Pictures and the HTML page of an evaluation. No ticket text: counts, shares, label names and ids."""

import base64
import html
import io
from collections.abc import Mapping, Sequence

import numpy as np

from ticket_engine.evaluation import Comparison, Evaluation, Share, fitted_words, plain_words

MOST_NUMBERED = 20
STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#1b1b1b}"
    "table{border-collapse:collapse;margin:.5rem 0 1.5rem}td,th{padding:.2rem .7rem;border-bottom:1px solid #ddd;"
    "text-align:right}td:first-child,th:first-child{text-align:left}img{max-width:100%}p.words{font-size:1.1rem}"
)


def draw_pictures(evaluation: Evaluation) -> dict[str, bytes]:
    """PNG bytes by name: confusion, reliability, review."""
    return {
        "confusion": _confusion_picture(evaluation),
        "reliability": _reliability_picture(evaluation),
        "review": _review_picture(evaluation),
    }


def page(
    evaluation: Evaluation, pictures: Mapping[str, bytes], comparisons: Mapping[str, tuple[Share, Comparison]]
) -> str:
    """One self-contained HTML page.

    Args:
        evaluation: Of the run.
        pictures: From `draw_pictures`.
        comparisons: Accuracy of other answers to the same tickets, and how the run compares with them, by name.
    """
    labels = [(s.label, s.recall.tickets, s.precision, s.recall, f"{s.f1:.3f}") for s in evaluation.per_label]
    pairs = [(f"{p.gold} → {p.predicted}", p.tickets, ", ".join(p.ids)) for p in evaluation.confused]
    against = [
        (name, accuracy, f"{c.difference:+.3f}", c.only_first, c.only_second, f"{c.chance:.4f}")
        for name, (accuracy, c) in comparisons.items()
    ]
    review = [(f"{p.share:.0%}", p.kept, f"{p.accuracy:.3f}") for p in evaluation.review[:11]]
    groups = [(name, scores.tickets, scores) for name, scores in evaluation.groups.items()]
    parts = [
        f"<p class=words>{html.escape(plain_words(evaluation))}</p>",
        f"<p class=words>{html.escape(fitted_words(evaluation))}</p>",
        table(("", "value"), summary_rows(evaluation)),
        "<h2>Other answers to the same tickets</h2>" if against else "",
        table(("answers", "accuracy", "this run less them", "only here", "only there", "p"), against),
        "<h2>Labels</h2>",
        table(("label", "tickets", "precision", "recall", "F1"), labels),
        "<h2>Most confused</h2>" if pairs else "",
        table(("gold → given", "tickets", "ids, surest first"), pairs),
        "<h2>Groups</h2>" if groups else "",
        table(("group", "tickets", "accuracy"), groups),
        "<h2>Review</h2>",
        table(("sent to people", "kept", "accuracy of the kept"), review),
        *(f'<p><img alt="{name}" src="{data_uri(png)}"></p>' for name, png in pictures.items()),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Label evaluation</title>'
        f"<style>{STYLE}</style></head><body><h1>Label evaluation</h1>\n{body}\n</body></html>\n"
    )


def summary_rows(evaluation: Evaluation) -> list[tuple[str, str]]:
    """The main numbers as name and value."""
    label, most = evaluation.largest
    return [
        ("tickets", str(evaluation.tickets)),
        ("gold rows without prediction", str(evaluation.missing)),
        ("accuracy (95 % interval)", str(evaluation.accuracy)),
        ("macro F1", f"{evaluation.macro_f1:.3f}"),
        (f"always answering {label}", f"{most:.3f}"),
        ("expected calibration error", f"{evaluation.calibration_error:.3f}"),
    ]


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """An HTML table, everything escaped; empty without rows."""
    if not rows:
        return ""
    top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    lines = ("".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows)
    return f"<table><tr>{top}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def data_uri(png: bytes) -> str:
    """A picture as text that a browser shows."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _figure(width: float, height: float):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _png(figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _confusion_picture(evaluation: Evaluation) -> bytes:
    counts = np.array(evaluation.confusion, dtype=float)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    size = max(5.0, min(16.0, 2.5 + 0.45 * len(evaluation.labels)))
    figure, axes = _figure(size + 1, size)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    ticks = range(len(evaluation.labels))
    axes.set_xticks(ticks, evaluation.labels, rotation=90, fontsize=8)
    axes.set_yticks(ticks, evaluation.labels, fontsize=8)
    axes.set_xlabel("given")
    axes.set_ylabel("gold")
    axes.set_title("Tickets by gold and given label; shade: share of the gold label")
    if len(evaluation.labels) <= MOST_NUMBERED:
        for (row, column), count in np.ndenumerate(counts):
            if count:
                colour = "white" if shares[row, column] > 0.5 else "black"
                axes.text(column, row, f"{count:.0f}", ha="center", va="center", fontsize=8, color=colour)
    return _png(figure)


def _reliability_picture(evaluation: Evaluation) -> bytes:
    figure, axes = _figure(5, 5)
    axes.plot([0, 1], [0, 1], color="grey", linewidth=1, label="perfect")
    bins = evaluation.reliability
    axes.plot([b.confidence for b in bins], [b.accuracy for b in bins], color="tab:blue", marker="o", label="this run")
    for b in bins:
        axes.annotate(
            str(b.tickets), (b.confidence, b.accuracy), textcoords="offset points", xytext=(5, -10), fontsize=7
        )
    axes.set(xlabel="probability given", ylabel="share right", xlim=(0, 1), ylim=(0, 1))
    axes.set_title(f"Reliability (error {evaluation.calibration_error:.3f}; numbers: tickets)")
    axes.legend()
    return _png(figure)


def _review_picture(evaluation: Evaluation) -> bytes:
    figure, axes = _figure(5, 4)
    axes.plot([100 * p.share for p in evaluation.review], [p.accuracy for p in evaluation.review], marker=".")
    axes.set(xlabel="% of tickets sent to people, least sure first", ylabel="share of the rest that is right")
    axes.set_title("Review curve")
    axes.grid(alpha=0.3)
    return _png(figure)
