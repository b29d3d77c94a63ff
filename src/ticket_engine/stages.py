"""The stages of a run after reading, over its working folder: each takes paths and returns small values.

`tasks` wraps each in a Prefect task; `classifier` calls them one after the other without Prefect.
"""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq

from ticket_engine import heads
from ticket_engine.bucket_files import Bucket, BucketPlan, write_buckets
from ticket_engine.bucketing import PlanRule
from ticket_engine.engine_spec import SPEC_FILE, TOKENIZER_FILE, read_spec
from ticket_engine.errors import ScoringError
from ticket_engine.head_files import load_head
from ticket_engine.head_scoring import HeadScorer, LabelScorer, float32_scorer, load_scorer
from ticket_engine.parts import part_path, read_part
from ticket_engine.reading import quarantine_late, read_columns, read_texts
from ticket_engine.results import GatherSummary, bucket_of_tickets, gather_predictions, summarise
from ticket_engine.review import ReviewRule, choose_review, review_rows
from ticket_engine.schemas import (
    BUCKET_INDEX,
    INPUT_INDEX,
    LOG_PROBS,
    MARGIN,
    NEEDS_REVIEW,
    PREDICTIONS_FILE,
    PROBABILITY,
    REASON,
    REVIEW_FILE,
    STAGE,
    TEXT,
    TICKET_ID,
    TICKET_KEY,
    TOKEN_IDS,
    TOKEN_LENGTH,
)
from ticket_engine.spot_check import (
    FLOAT32_LOG_PROBS,
    REFERENCE_LABEL,
    REFERENCE_LOG_PROBS,
    SpotCheck,
    check_predictions,
)
from ticket_engine.spot_sample import IN_FLOAT32, ROW
from ticket_engine.store import StoredSummary, empty_scores, find_stored, keep_night, tidy_store
from ticket_engine.tokenization import CHUNK_ROWS, TokenizeSummary, load_ticket_tokenizer, tokenize_tickets

TICKETS, TOKENS, REJECTED, STORED, BY_TEXT, BUCKETS, FAILED = (
    "tickets.parquet",
    "tokens.parquet",
    "rejected.parquet",
    "stored.parquet",
    "by_text.parquet",
    "buckets",
    "failed.parquet",
)

__all__ = ["SPEC_FILE", "decide_by_text", "find_scored", "gather", "plan", "rescore", "tokenize"]


def tokenize(folder: Path) -> TokenizeSummary:
    """Token ids and length columns of the run's tickets; see `tokenization.tokenize_tickets`."""
    spec = read_spec(folder)
    tokenizer = load_ticket_tokenizer(
        folder / TOKENIZER_FILE, spec.prompt, max_ticket_tokens=spec.max_ticket_tokens, truncate=spec.truncate
    )
    return tokenize_tickets(
        folder / TICKETS, folder / TOKENS, folder / REJECTED, tokenizer, keep_text=spec.head is not None
    )


def find_scored(folder: Path, store: Path) -> StoredSummary:
    """How many of the run's distinct tickets an earlier run scored; these never enter a bucket."""
    wanted = pl.read_parquet(folder / TOKENS, columns=[TICKET_KEY], glob=False).unique()
    known, summary = find_stored(store, read_spec(folder).score_key, wanted)
    used = known.filter(pl.col(REASON).is_null())
    used.write_parquet(folder / STORED)
    return replace(summary, tickets=len(used))


def decide_by_text(folder: Path) -> int:
    """Stage 0 of the run's head: tickets that their text alone decides never enter a bucket; how many different ones.

    The table is read a chunk at a time; tickets that an earlier run scored are left out.
    """
    spec = read_spec(folder)
    head = load_head(spec.head, spec.head_hash)
    seen = pl.read_parquet(folder / STORED, columns=[TICKET_KEY], glob=False)
    made = [empty_scores()]
    for batch in pq.ParquetFile(folder / TOKENS).iter_batches(CHUNK_ROWS, columns=[TICKET_KEY, TEXT]):
        chunk = pl.from_arrow(batch).unique(TICKET_KEY, keep="first", maintain_order=True)
        chunk = chunk.join(seen, on=TICKET_KEY, how="anti", maintain_order="left")
        log_probs, is_sure = heads.decide_by_text(head, chunk[TEXT].to_list())
        keys = chunk.filter(pl.Series(is_sure, dtype=pl.Boolean)).select(TICKET_KEY)
        scores = pl.Series(LOG_PROBS, log_probs[is_sure].tolist(), dtype=pl.List(pl.Float32))
        made.append(keys.with_columns(scores, pl.lit(0, pl.Int16).alias(STAGE), pl.lit(None, pl.String).alias(REASON)))
    decided = pl.concat(made).unique(TICKET_KEY, keep="first")
    decided.write_parquet(folder / BY_TEXT)
    return len(decided)


def _scored_before_planning(folder: Path) -> pl.DataFrame:
    """Scores of tickets that need no bucket: known from an earlier run, or decided by their text."""
    paths = [path for path in (folder / STORED, folder / BY_TEXT) if path.is_file()]
    frames = [pl.read_parquet(path, glob=False) for path in paths]
    return pl.concat([_as_lists(frame) for frame in [empty_scores(), *frames]])


def _as_lists(scores: pl.DataFrame) -> pl.DataFrame:
    return scores.with_columns(pl.col(LOG_PROBS).cast(pl.List(pl.Float32)))


def plan(folder: Path, *, batch_size: int | None, max_buckets: int) -> BucketPlan:
    """Buckets of the tickets that still need scores, written to the working folder."""
    spec = read_spec(folder)
    rule = PlanRule(
        padded=spec.execution == "padded",
        token_budget=spec.token_budget,
        batch_size=1 if spec.execution == "sequential" else batch_size,
        extra_tokens=spec.extra_tokens,
    )
    made = write_buckets(folder / TOKENS, _scored_before_planning(folder), folder / BUCKETS, rule, max_buckets)
    by_text = pq.read_metadata(folder / BY_TEXT).num_rows if (folder / BY_TEXT).is_file() else 0
    made = replace(made, stored=made.stored - by_text, by_text=by_text)
    (folder / BUCKETS / "plan.json").write_text(json.dumps([asdict(bucket) for bucket in made.buckets]))
    return made


def gather(
    folder: Path,
    store: Path,
    source: str,
    rule: ReviewRule | None = None,
) -> GatherSummary:
    """Write ``predictions.parquet`` of a run, and add tickets that could not be scored to its quarantine.

    Where something was promised about review, predictions say which tickets need it, and ``review.parquet``
    lists them, the most valuable first.

    Args:
        folder: The working folder.
        store: Where the buckets' parts are.
        source: The input table, for the whole rows of late rejections.
        rule: What was promised about review.

    Raises:
        ScoringError: A bucket's part is missing or damaged, or a ticket has no score.
    """
    spec, id_column = read_spec(folder), read_columns(folder).id_column
    buckets = _planned(folder)
    frames = [_scored_before_planning(folder)]
    for bucket in buckets:
        part = _part_of(bucket, store, spec.score_key)
        if part is None:
            raise ScoringError(
                f"The scores of bucket {bucket.index} are missing or damaged. Run again: only it is redone."
            )
        frames.append(_as_lists(part))
    scores = pl.concat(frames).unique(TICKET_KEY, keep="any")
    tokens = pl.scan_parquet(folder / TOKENS, glob=False).select(pl.exclude(TOKEN_IDS, TEXT)).collect()
    where = bucket_of_tickets([Path(bucket.path) for bucket in buckets])
    predictions, failed = gather_predictions(tokens, scores, where, spec.labels, has_head=spec.head is not None)
    summary = summarise(predictions, failed, spec.labels)
    if rule is not None and rule.is_given:
        head = load_head(spec.head, spec.head_hash) if spec.head else None
        choice = choose_review(head, predictions[PROBABILITY].to_numpy(), rule)
        review = choice.needed
        reviewed = predictions.filter(review).select(TICKET_ID)
        places = tokens.select(TICKET_ID, INPUT_INDEX).join(reviewed, on=TICKET_ID, how="semi")
        texts = read_texts(source, folder, places)
        review_rows(predictions, review, texts, id_column).write_parquet(folder / REVIEW_FILE)
        predictions = predictions.with_columns(pl.Series(NEEDS_REVIEW, review, dtype=pl.Boolean))
        summary = replace(
            summary, needs_review=int(review.sum()), review_threshold=choice.threshold, review_words=choice.words
        )
    predictions.columns = [id_column, *predictions.columns[1:]]
    predictions.write_parquet(folder / PREDICTIONS_FILE)
    late = pl.read_parquet(folder / REJECTED, columns=[INPUT_INDEX, REASON], glob=False)
    pl.concat([late, failed]).sort(INPUT_INDEX).write_parquet(folder / FAILED)
    if len(late) + len(failed):
        quarantine_late(source, folder, folder / FAILED)
    return summary


def _planned(folder: Path) -> list[Bucket]:
    return [Bucket(**fields) for fields in json.loads((folder / BUCKETS / "plan.json").read_text())]


def _part_of(bucket: Bucket, store: Path, score_key: str) -> pl.DataFrame | None:
    """Scores of a bucket's tickets; from elsewhere in the store where another run has put its part into a night."""
    part = read_part(part_path(store, score_key, bucket.content_key), score_key)
    if part is not None:
        return part
    tickets = pl.read_parquet(bucket.path, columns=[TICKET_KEY], glob=False)
    found, _ = find_stored(store, score_key, tickets)
    return found if len(found) == len(tickets) else None


def keep_scores(folder: Path, store: Path, days: int) -> int:
    """Keep a published run's scores for the next ones, and tidy the store; how many old files were deleted.

    Args:
        folder: The run's working folder.
        store: The store.
        days: Scores that no run used for so long are deleted.
    """
    spec, buckets = read_spec(folder), _planned(folder)
    paths = [part_path(store, spec.score_key, bucket.content_key) for bucket in buckets]
    stored = pl.read_parquet(folder / STORED, glob=False) if (folder / STORED).is_file() else empty_scores()
    parts = (part for path in paths if (part := read_part(path, spec.score_key)) is not None)
    keep_night(store, spec.score_key, itertools.chain([stored], parts), paths)
    return tidy_store(store, days)


def spot_check(folder: Path, size: int, seed: int) -> SpotCheck:
    """Sampled predictions of a run scored again by the reference; only these are read whole.

    Args:
        folder: The run's working folder, gathered.
        size: Tickets to draw, see `spot_sample.choose_sample`.
        seed: Of the sample.
    """
    scan = pl.scan_parquet(folder / PREDICTIONS_FILE, glob=False)
    table = scan.select(pl.nth(0).alias(TICKET_ID), pl.nth(*range(1, len(scan.collect_schema()))))
    figures = table.select(TICKET_ID, BUCKET_INDEX, MARGIN, TOKEN_LENGTH).collect()

    def again(sample: pl.DataFrame) -> pl.DataFrame:
        rows = table.with_row_index(ROW).join(sample.lazy().select(ROW), on=ROW, how="semi").collect()
        known = sample.select(ROW, *(name for name in sample.columns if name not in rows.columns))
        whole = rows.join(known, on=ROW, how="left", validate="1:1", maintain_order="left")
        return rescore(folder, whole.select(pl.exclude(ROW), ROW))

    return check_predictions(figures, size, seed, tolerance=read_spec(folder).tolerance, rescore=again)


def rescore(folder: Path, sample: pl.DataFrame) -> pl.DataFrame:
    """The reference's answers for sampled predictions, one ticket at a time.

    Args:
        folder: The run's working folder.
        sample: Rows of the predictions, the id as ``ticket_id``. Ids that are not in the input are
            left out: the contract's coverage reports them. Rows marked ``in_float32`` are scored in float32
            too, unless that is the run's dtype; the run's own weights leave memory before that.

    Returns:
        ``sample`` with ``reference_label`` and ``reference_log_probs`` (float32 list, labels in order), and with
        ``float32_log_probs`` (null where it was not asked) if a row was scored in float32 on top.
    """
    spec = read_spec(folder)
    text = pl.col(TEXT) if spec.head else pl.lit("").alias(TEXT)
    tokens = pl.scan_parquet(folder / TOKENS, glob=False).select(TICKET_ID, TOKEN_IDS, text)
    wanted = tokens.join(sample.lazy().select(TICKET_ID), on=TICKET_ID, how="semi").collect()
    ids = sample.select(TICKET_ID).join(wanted, on=TICKET_ID, how="inner", validate="1:1", maintain_order="left")
    sample = sample.join(ids.select(TICKET_ID), on=TICKET_ID, how="semi", maintain_order="left")
    depths = sample[STAGE] if STAGE in sample.columns else pl.Series([None] * len(sample), dtype=pl.Int16)
    rows = ids.with_columns(depths.alias(STAGE))
    answers = _reference_answers(load_scorer(folder), rows, spec.workers)
    scored = sample.with_columns(
        pl.Series(REFERENCE_LABEL, [spec.labels[int(row.argmax())] for row in answers], dtype=pl.String),
        pl.Series(REFERENCE_LOG_PROBS, [row.tolist() for row in answers], dtype=pl.List(pl.Float32)),
    )
    if spec.dtype == "float32" or IN_FLOAT32 not in sample.columns or not sample[IN_FLOAT32].any():
        return scored
    marked = sample[IN_FLOAT32]
    exact = iter(_reference_answers(float32_scorer(folder), rows.filter(marked), spec.workers))
    column = [next(exact).tolist() if asked else None for asked in marked]
    return scored.with_columns(pl.Series(FLOAT32_LOG_PROBS, column, dtype=pl.List(pl.Float32)))


def _reference_answers(scorer: LabelScorer | HeadScorer, rows: pl.DataFrame, workers: int) -> list[np.ndarray]:
    """Log-probabilities ``(labels,)`` of each row's ticket."""
    tickets = [ids.to_numpy() for ids in rows[TOKEN_IDS]]
    with ThreadPoolExecutor(workers) as pool:
        return [answer for answer, _ in pool.map(scorer.reference, tickets, rows[TEXT], rows[STAGE].to_list())]
