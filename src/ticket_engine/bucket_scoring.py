"""One bucket: scored batch by batch, written as one part of the store."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from ticket_engine.bucket_files import Bucket, read_bucket
from ticket_engine.engine import Engine, load_engine, read_spec
from ticket_engine.errors import ScoringError
from ticket_engine.schemas import BATCH_INDEX, REASON_NOT_FINITE, TICKET_KEY, TOKEN_IDS
from ticket_engine.store import part_path, read_part, write_part

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
        stored = _score_bucket(load_engine(folder), read_bucket(bucket.path))
        log_probs = stored["log_probs"].to_numpy()
        write_part(path, spec.score_key, stored[TICKET_KEY], log_probs, stored["reason"])
        reused = False
    else:
        reused = True
    failed = int(stored["reason"].is_not_null().sum())
    seconds = time.perf_counter() - started
    return BucketResult(bucket.index, bucket.tickets, bucket.real_tokens, seconds, failed, reused)


def _score_bucket(engine: Engine, tickets: pl.DataFrame) -> pl.DataFrame:
    """Columns ``ticket_key``, ``log_probs`` (array) and ``reason`` of a bucket's tickets."""
    scores, reasons = [], []
    for batch in tickets.partition_by(BATCH_INDEX, maintain_order=True):
        ids = [row.to_numpy() for row in batch[TOKEN_IDS]]
        try:
            scores.append(engine.score(ids))
            reasons += [None] * len(ids)
        except ScoringError:
            log.warning("A batch of %d tickets has scores that are not finite: one by one", len(ids))
            for one in ids:
                row, reason = _score_alone(engine, one)
                scores.append(row)
                reasons.append(reason)
    return pl.DataFrame(
        [
            tickets[TICKET_KEY],
            pl.Series("log_probs", np.concatenate(scores), dtype=pl.Array(pl.Float32, len(engine.spec.labels))),
            pl.Series("reason", reasons, dtype=pl.String),
        ]
    )


def _score_alone(engine: Engine, ids: np.ndarray) -> tuple[np.ndarray, str | None]:
    """Scores ``(1, labels)`` of a ticket by itself, NaN with a reason if they are not finite even so."""
    try:
        return engine.score([ids]), None
    except ScoringError:
        return np.full((1, len(engine.spec.labels)), np.nan, dtype=np.float32), REASON_NOT_FINITE
