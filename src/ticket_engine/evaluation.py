"""How right a run's labels are, against labels that people gave."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from scipy import stats

from ticket_engine.calibration import ReliabilityBin, expected_calibration_error, reliability

CONFIDENCE = 0.95
EXAMPLE_IDS = 5
REVIEW_SHARES = tuple(step / 20 for step in range(20))


@dataclass(frozen=True, slots=True)
class Share:
    """``right`` of ``tickets``, with a two-sided 95 % Wilson interval; value 0 and interval 0 to 1 if there are none."""

    right: int
    tickets: int
    value: float
    lower: float
    upper: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.lower:.3f} to {self.upper:.3f})"


@dataclass(frozen=True, slots=True)
class LabelScore:
    """One label: how many of the tickets it was given to have it, and how many that have it were found."""

    label: str
    precision: Share
    recall: Share
    f1: float


@dataclass(frozen=True, slots=True)
class ConfusedPair:
    """Tickets of one gold label that got another label, the surest mistakes' ids first."""

    gold: str
    predicted: str
    tickets: int
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReviewPoint:
    """Accuracy of what is left when the least sure share of tickets goes to people."""

    share: float
    kept: int
    accuracy: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Everything that is shown of one run.

    Attributes:
        missing: Gold rows without a prediction; they count in no score.
        confusion: Tickets, ``[gold][predicted]`` in the order of ``labels``.
        fitted: Tickets that the run's head was fitted on: their labels were known. None where that cannot be told.
        largest: The commonest gold label and its share, what always answering it would score.
    """

    labels: tuple[str, ...]
    tickets: int
    missing: int
    accuracy: Share
    macro_f1: float
    per_label: tuple[LabelScore, ...]
    confusion: tuple[tuple[int, ...], ...]
    confused: tuple[ConfusedPair, ...]
    calibration_error: float
    reliability: tuple[ReliabilityBin, ...]
    review: tuple[ReviewPoint, ...]
    groups: dict[str, Share]
    largest: tuple[str, float]
    fitted: int | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sets of answers to the same tickets: exact McNemar test on those that only one got right."""

    only_first: int
    only_second: int
    difference: float
    chance: float


def share(right: int, tickets: int) -> Share:
    """A share with its Wilson interval."""
    if tickets == 0:
        return Share(0, 0, 0.0, 0.0, 1.0)
    interval = stats.binomtest(int(right), int(tickets)).proportion_ci(CONFIDENCE, method="wilson")
    return Share(int(right), int(tickets), right / tickets, float(interval.low), float(interval.high))


def evaluate(joined: pl.DataFrame, labels: Sequence[str], missing: int) -> Evaluation:
    """Scores of predictions.

    Args:
        joined: Columns ``id`` (String), ``gold``, ``label``, ``probability`` and, where groups are asked
            for, ``group``; one row a ticket that has both labels.
        labels: Class ids in order.
        missing: Gold rows that have no prediction.
    """
    place = {label: index for index, label in enumerate(labels)}
    gold = np.array([place[name] for name in joined["gold"]], dtype=np.int64)
    given = np.array([place[name] for name in joined["label"]], dtype=np.int64)
    confidence = joined["probability"].to_numpy().astype(np.float64)
    correct = gold == given
    confusion = np.zeros((len(labels), len(labels)), dtype=np.int64)
    np.add.at(confusion, (gold, given), 1)
    per_label = tuple(_label_score(label, confusion, index) for index, label in enumerate(labels))
    present = [score.f1 for score in per_label if score.recall.tickets or score.precision.tickets]
    most = int(confusion.sum(1).argmax())
    return Evaluation(
        labels=tuple(labels),
        tickets=len(joined),
        missing=missing,
        accuracy=share(int(correct.sum()), len(joined)),
        macro_f1=float(np.mean(present)) if present else 0.0,
        per_label=per_label,
        confusion=tuple(tuple(int(count) for count in row) for row in confusion),
        confused=_confused(joined, confusion, labels),
        calibration_error=expected_calibration_error(confidence, correct),
        reliability=reliability(confidence, correct),
        review=review_curve(confidence, correct),
        groups=_groups(joined),
        largest=(labels[most], float(confusion[most].sum() / max(len(joined), 1))),
    )


def review_curve(confidence: np.ndarray, correct: np.ndarray) -> tuple[ReviewPoint, ...]:
    """Accuracy kept when the least sure 0, 5, ... 95 % go to people; ties in the order of the rows."""
    ordered = correct[np.argsort(confidence, kind="stable")]
    points = []
    for part in REVIEW_SHARES:
        kept = ordered[int(np.floor(part * len(ordered) + 1e-9)) :]
        if len(kept):
            points.append(ReviewPoint(part, len(kept), float(kept.mean())))
    return tuple(points)


def compare_answers(first: np.ndarray, second: np.ndarray) -> Comparison:
    """Whether one set of answers is better than another on the same tickets.

    Args:
        first: Whether each ticket was right, bool.
        second: The same for the other answers, same tickets in the same order.
    """
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    apart = only_first + only_second
    chance = float(stats.binomtest(only_first, apart).pvalue) if apart else 1.0
    return Comparison(only_first, only_second, (only_first - only_second) / max(len(first), 1), chance)


def fitted_words(evaluation: Evaluation) -> str:
    """A warning where tickets were fitting rows of the run's head; empty where none was, or it cannot be told."""
    if not evaluation.fitted:
        return ""
    return (
        f"Warning: {evaluation.fitted} of these {evaluation.tickets} tickets were fitting rows of the run's head. Their labels "
        "were known to it, so new tickets will be labelled less well. Evaluate on tickets that it has not seen."
    )


def plain_words(evaluation: Evaluation) -> str:
    """What the scores mean, in a sentence or two."""
    label, most = evaluation.largest
    accuracy = evaluation.accuracy
    if accuracy.lower <= most:
        return (
            f"These labels are no better than chance can explain: accuracy {accuracy}, while always answering "
            f"{label} gives {most:.3f}. Either the texts say nothing about the labels, or nothing was learnt from them."
        )
    tenth = min(evaluation.review, key=lambda point: abs(point.share - 0.1))
    return (
        f"{accuracy.value:.1%} of {evaluation.tickets} labels are right; always answering {label} would give {most:.1%}. "
        f"With the least sure {tenth.share:.0%} sent to people, {tenth.accuracy:.1%} of the rest are right."
    )


def _label_score(label: str, confusion: np.ndarray, index: int) -> LabelScore:
    right = int(confusion[index, index])
    given, has = int(confusion[:, index].sum()), int(confusion[index].sum())
    return LabelScore(label, share(right, given), share(right, has), 2 * right / (given + has) if given + has else 0.0)


def _confused(joined: pl.DataFrame, confusion: np.ndarray, labels: Sequence[str]) -> tuple[ConfusedPair, ...]:
    wrong = joined.filter(pl.col("gold") != pl.col("label")).sort("probability", descending=True, maintain_order=True)
    off = confusion.copy()
    np.fill_diagonal(off, 0)
    pairs = []
    for flat in np.argsort(-off, axis=None, kind="stable")[:10]:
        row, column = np.unravel_index(flat, off.shape)
        if off[row, column] == 0:
            break
        here = wrong.filter((pl.col("gold") == labels[row]) & (pl.col("label") == labels[column]))
        ids = tuple(here["id"][:EXAMPLE_IDS].to_list())
        pairs.append(ConfusedPair(labels[row], labels[column], int(off[row, column]), ids))
    return tuple(pairs)


def _groups(joined: pl.DataFrame) -> dict[str, Share]:
    if "group" not in joined.columns:
        return {}
    right = (pl.col("gold") == pl.col("label")).sum().alias("right")
    counted = joined.group_by("group").agg(right, pl.len().alias("tickets")).sort("group", nulls_last=True)
    names = ["(none)" if name is None else name for name in counted["group"]]
    return {
        name: share(right, tickets)
        for name, right, tickets in zip(names, counted["right"], counted["tickets"], strict=True)
    }
