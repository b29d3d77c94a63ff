"""Which tickets people should look at, and in which order their labels are worth most."""

from dataclasses import dataclass

import numpy as np
import polars as pl

from ticket_engine.calibration import PROMISE_CONFIDENCE, budget_threshold, precision_threshold
from ticket_engine.errors import SettingsError
from ticket_engine.heads import Head
from ticket_engine.schemas import LABEL, LOG_PROBS, PROBABILITY

PREDICTED_LABEL, SECOND_LABEL, SECOND_PROBABILITY, VALUE = (
    "predicted_label",
    "second_label",
    "second_probability",
    "value",
)


@dataclass(frozen=True, slots=True)
class ReviewRule:
    """What was promised; at most one of the two.

    Attributes:
        precision: Share of right labels among the tickets that no one looks at, such as 0.95.
        budget: Share of a run's tickets that may go to people, such as 0.1.
    """

    precision: float | None = None
    budget: float | None = None

    @property
    def is_given(self) -> bool:
        """Whether anything was promised."""
        return self.precision is not None or self.budget is not None

    def __post_init__(self) -> None:
        if self.precision is not None and self.budget is not None:
            raise SettingsError("A promised precision and a review budget exclude each other. Give one of them.")


@dataclass(frozen=True, slots=True)
class ReviewChoice:
    """Which tickets need a look.

    Attributes:
        needed: bool ``(tickets,)``.
        threshold: Confidence below which they do; None where nothing was promised or nothing can be.
        words: What was promised, or why it cannot be; empty where nothing was asked.
    """

    needed: np.ndarray
    threshold: float | None
    words: str


def choose_review(head: Head | None, confidence: np.ndarray, rule: ReviewRule) -> ReviewChoice:
    """Which tickets of a run need a look, and the confidence below which they do.

    A promised precision uses what the head showed on held-out fitting tickets that chose nothing, so each ticket is
    judged by itself; where no confidence keeps it, all tickets need a look. A budget ranks the run's own tickets.

    Args:
        head: With its held-out answers; a budget needs none.
        confidence: Highest label probability a ticket, ``(tickets,)``.
        rule: What was promised; with neither, no ticket needs a look.

    Raises:
        SettingsError: A precision was promised without a head.
    """
    if rule.precision is not None:
        if head is None:
            raise SettingsError("A promised precision needs a fitted head. Give one, or set a review budget instead.")
        threshold = precision_threshold(head.held_out_confidence, head.held_out_correct, rule.precision)
        rows = len(head.held_out_correct)
        if threshold is None:
            words = (
                f"a precision of {rule.precision:g} cannot be promised with {rows} held-out tickets: all need a look"
            )
            return ReviewChoice(np.ones(len(confidence), dtype=bool), None, words)
        words = (
            f"of the labels that nobody looks at {rule.precision:g} are right, with {PROMISE_CONFIDENCE:.0%} confidence "
            f"by {rows} held-out tickets"
        )
        return ReviewChoice(confidence < threshold, threshold, words)
    if rule.budget is not None:
        threshold = budget_threshold(confidence, rule.budget)
        finite = threshold if np.isfinite(threshold) else None
        return ReviewChoice(confidence < threshold, finite, f"the least sure {rule.budget:.0%}")
    return ReviewChoice(np.zeros(len(confidence), dtype=bool), None, "")


def review_rows(
    predictions: pl.DataFrame, needs_review: np.ndarray, texts: pl.DataFrame, id_column: str
) -> pl.DataFrame:
    """Tickets for people, the most valuable first, in a form that `labelled.read_labelled` takes back.

    Columns: the id, the text columns, ``label`` (empty: for people), ``predicted_label`` and its ``probability``, the
    runner-up, and ``value = -sum over labels of p log p``: how much the label would tell. Ties stay in input order.
    Where id or text has one of these names, that column of ours gets ``review_`` before its name.

    Args:
        predictions: Of all tickets; the first column is the id.
        needs_review: bool, one a row.
        texts: Text columns of the tickets that need a look, in the same order.
        id_column: The caller's name of the id.
    """
    rows = predictions.filter(pl.Series(needs_review, dtype=pl.Boolean))
    names = np.array([field.name for field in predictions.schema[LOG_PROBS].fields])
    log_probs = rows[LOG_PROBS].struct.unnest().to_numpy().astype(np.float64)
    if not len(rows):
        log_probs = np.zeros((0, len(names)))
    second = np.argsort(-log_probs, axis=1, kind="stable")[:, 1]
    probs = np.exp(log_probs)
    value = -(probs * log_probs).sum(1)
    own = [
        pl.Series(LABEL, [None] * len(rows), dtype=pl.String),
        rows[LABEL].alias(PREDICTED_LABEL),
        rows[PROBABILITY],
        pl.Series(SECOND_LABEL, names[second], dtype=pl.String),
        pl.Series(SECOND_PROBABILITY, probs[np.arange(len(rows)), second], dtype=pl.Float32),
        pl.Series(VALUE, value, dtype=pl.Float32),
    ]
    taken = {*texts.columns, id_column}
    own = [series.alias(f"review_{series.name}") if series.name in taken else series for series in own]
    order = np.argsort(-value, kind="stable")
    beside = [series for series in texts.get_columns() if series.name != id_column]
    columns = [rows.to_series(0).alias(id_column), *beside, *own]
    return pl.DataFrame({column.name: column for column in columns})[order]
