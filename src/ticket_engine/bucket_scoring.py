"""One bucket: scored batch by batch, written as one part of the store."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from ticket_engine.bucket_files import Bucket, read_bucket
from ticket_engine.engine_spec import read_spec
from ticket_engine.errors import ScoringError
from ticket_engine.head_scoring import HeadScorer, LabelScorer, load_scorer
from ticket_engine.parts import part_path, read_part, write_part
from ticket_engine.schemas import (
    BATCH_INDEX,
    LOG_PROBS,
    REASON,
    REASON_NOT_FINITE,
    STAGE,
    TEXT,
    TICKET_KEY,
    TOKEN_IDS,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BucketResult:
    """What one bucket took. ``reused`` is True if its part was there already."""

    index: int
    tickets: int
    tokens: int
    seconds: float
    failed: int
    reused: bool


def classify_bucket(bucket: Bucket, folder: Path, store: Path) -> BucketResult:
    """Score a bucket's tickets and write them as a part of the store.

    A part that is there already and holds is not computed again.

    Args:
        bucket: From the plan.
        folder: The run's working folder, with its engine spec.
        store: Where parts are kept.
    """
    started = time.perf_counter()
    spec = read_spec(folder)
    path = part_path(store, spec.score_key, bucket.content_key)
    stored = read_part(path, spec.score_key)
    if stored is None:
        stored = _score_bucket(load_scorer(folder), read_bucket(bucket.path))
        write_part(path, spec.score_key, stored)
        reused = False
    else:
        reused = True
    failed = int(stored[REASON].is_not_null().sum())
    seconds = time.perf_counter() - started
    return BucketResult(bucket.index, bucket.tickets, bucket.real_tokens, seconds, failed, reused)


def _score_bucket(scorer: LabelScorer | HeadScorer, tickets: pl.DataFrame) -> pl.DataFrame:
    """Columns of a part, see `parts.write_part`, for a bucket's tickets."""
    scores, stages, reasons = [], [], []
    for batch in tickets.partition_by(BATCH_INDEX, maintain_order=True):
        ids = [row.to_numpy() for row in batch[TOKEN_IDS]]
        texts = batch[TEXT].to_list() if TEXT in batch.columns else [""] * len(batch)
        try:
            made, stage = scorer.score(ids, texts)
            outcomes = [(made, stage, [None] * len(ids))]
        except ScoringError:
            log.warning("A batch of %d tickets has scores that are not finite: one by one", len(ids))
            outcomes = [_score_alone(scorer, one, text) for one, text in zip(ids, texts, strict=True)]
        for rows, depths, why in outcomes:
            scores.append(rows)
            stages += depths
            reasons += why
    matrix = np.concatenate(scores)
    return pl.DataFrame(
        [
            tickets[TICKET_KEY],
            pl.Series(LOG_PROBS, matrix, dtype=pl.Array(pl.Float32, matrix.shape[1])),
            pl.Series(STAGE, stages, dtype=pl.Int16),
            pl.Series(REASON, reasons, dtype=pl.String),
        ]
    )


def _score_alone(scorer: LabelScorer | HeadScorer, ids: np.ndarray, text: str) -> tuple[np.ndarray, list, list]:
    """Scores ``(1, labels)`` of a ticket by itself, NaN with a reason if they are not finite even so."""
    try:
        return *scorer.score([ids], [text]), [None]
    except ScoringError:
        return np.full((1, scorer.labels), np.nan, dtype=np.float32), [None], [REASON_NOT_FINITE]
