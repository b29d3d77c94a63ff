"""From scored tickets back to the table: labels, margins, one outcome a row, in input order."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from ticket_engine.errors import ScoringError
from ticket_engine.schemas import (
    BUCKET_INDEX,
    INPUT_INDEX,
    IS_TRUNCATED,
    LABEL,
    LOG_PROBS,
    MARGIN,
    PROBABILITY,
    REASON,
    STAGE,
    TICKET_KEY,
    TOKEN_LENGTH,
    predictions_schema,
)


@dataclass(frozen=True, slots=True)
class GatherSummary:
    """Outcomes of a run.

    Attributes:
        predictions: How many.
        failed: Tickets that failed while scoring.
        label_counts: Predictions a label.
        stage_counts: Predictions by the layers after which a head decided them; empty without a head.
        needs_review: Predictions that people should look at, None where nothing was promised.
        review_threshold: Probability below which they should, None where nothing was promised or can be.
        review_words: What was promised, or why it cannot be.
    """

    predictions: int
    failed: int
    label_counts: dict[str, int]
    stage_counts: dict[str, int]
    needs_review: int | None = None
    review_threshold: float | None = None
    review_words: str = ""


def decide(log_probs: np.ndarray, labels: tuple[str, ...]) -> pl.DataFrame:
    """Label, probability, margin and log-probabilities of scored tickets.

    Args:
        log_probs: float32 ``(tickets, labels)``, natural log, normalised over the labels.
        labels: Class ids in the order of the columns. The first of equally likely labels wins.
    """
    probabilities = np.exp(log_probs.astype(np.float64))
    if len(log_probs):
        second, first = np.sort(probabilities, axis=1)[:, -2:].T
    else:
        second = first = np.zeros(0)
    names = pl.Series(LABEL, labels, dtype=pl.String)
    struct = pl.DataFrame({label: log_probs[:, index] for index, label in enumerate(labels)}).to_struct(LOG_PROBS)
    return pl.DataFrame(
        [
            names.gather(log_probs.argmax(1)),
            pl.Series(PROBABILITY, first.astype(np.float32)),
            pl.Series(MARGIN, (first - second).astype(np.float32)),
            struct,
        ]
    )


def gather_predictions(
    tokens: pl.DataFrame,
    scores: pl.DataFrame,
    buckets: pl.DataFrame,
    labels: tuple[str, ...],
    *,
    has_head: bool = False,
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Predictions in input order, and ``input_index`` and ``reason`` of tickets that could not be scored.

    Rows are joined by ``ticket_key``, many to one: equal texts share one score.

    Args:
        tokens: id, ``input_index``, ``ticket_key``, ``token_length``, ``is_truncated``.
        scores: ``ticket_key``, ``log_probs``, ``stage`` and ``reason``, each key once.
        buckets: ``ticket_key`` and ``bucket_index`` of the tickets scored in this run; others get null.
        labels: Class ids in the order of the scores.
        has_head: Whether the predictions tell the stage.

    Raises:
        ScoringError: A ticket has no score.
    """
    id_column = tokens.columns[0]
    joined = tokens.join(scores, on=TICKET_KEY, how="left", validate="m:1", maintain_order="left")
    lost = joined.filter(pl.col(LOG_PROBS).is_null())
    if len(lost):
        raise ScoringError(f"{len(lost)} of {len(tokens)} tickets have no score; the first is {lost[id_column][0]!r}.")
    joined = joined.join(buckets, on=TICKET_KEY, how="left", validate="m:1", maintain_order="left")
    failed = joined.filter(pl.col(REASON).is_not_null()).select(INPUT_INDEX, REASON)
    good = joined.filter(pl.col(REASON).is_null()).sort(INPUT_INDEX)
    matrix = good[LOG_PROBS].explode().to_numpy().astype(np.float32).reshape(len(good), len(labels))
    schema = predictions_schema(id_column, tokens.schema[id_column], labels, has_head=has_head)
    columns = good.select(id_column, TOKEN_LENGTH, IS_TRUNCATED, BUCKET_INDEX, STAGE)
    return pl.concat([columns, decide(matrix, labels)], how="horizontal").select(schema.names()).cast(schema), failed


def summarise(predictions: pl.DataFrame, failed: pl.DataFrame, labels: tuple[str, ...]) -> GatherSummary:
    """Counts of a run's outcomes; labels that no ticket got count 0."""
    counts = dict(predictions.group_by(LABEL).len().iter_rows())
    by_label = {label: int(counts.get(label, 0)) for label in labels}
    by_stage = dict(predictions.group_by(STAGE).len().sort(STAGE).iter_rows()) if STAGE in predictions.columns else {}
    return GatherSummary(
        len(predictions), len(failed), by_label, {str(stage): int(count) for stage, count in by_stage.items()}
    )


def bucket_of_tickets(paths: list[Path]) -> pl.DataFrame:
    """``ticket_key`` and ``bucket_index`` of all bucket files of a run."""
    frames = [
        pl.read_parquet(path, columns=[TICKET_KEY], glob=False).with_columns(
            pl.lit(int(path.stem), pl.UInt32).alias(BUCKET_INDEX)
        )
        for path in paths
    ]
    return pl.concat(frames) if frames else pl.DataFrame(schema={TICKET_KEY: pl.Binary, BUCKET_INDEX: pl.UInt32})
