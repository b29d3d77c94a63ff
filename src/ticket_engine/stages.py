"""The stages of a run after reading, over its working folder: each takes paths and returns small values.

`tasks` wraps each in a Prefect task; `classifier` calls them one after the other without Prefect.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import polars as pl

from ticket_engine.bucket_files import Bucket, BucketPlan, write_buckets
from ticket_engine.bucketing import PlanRule
from ticket_engine.engine import SPEC_FILE, TOKENIZER_FILE, load_engine, read_spec
from ticket_engine.errors import ScoringError
from ticket_engine.reading import quarantine_late
from ticket_engine.results import GatherSummary, bucket_of_tickets, gather_predictions, summarise
from ticket_engine.schemas import INPUT_INDEX, LOG_PROBS, PREDICTIONS_FILE, REASON, TICKET_KEY, TOKEN_IDS
from ticket_engine.store import StoredSummary, empty_scores, part_path, read_part, read_store
from ticket_engine.tokenization import TokenizeSummary, load_ticket_tokenizer, tokenize_tickets

TICKETS, TOKENS, REJECTED, STORED, BUCKETS, FAILED = (
    "tickets.parquet",
    "tokens.parquet",
    "rejected.parquet",
    "stored.parquet",
    "buckets",
    "failed.parquet",
)

__all__ = ["SPEC_FILE", "find_scored", "gather", "plan", "rescore", "tokenize"]


def tokenize(folder: Path) -> TokenizeSummary:
    """Token ids and length columns of the run's tickets; see `tokenization.tokenize_tickets`."""
    spec = read_spec(folder)
    tokenizer = load_ticket_tokenizer(
        folder / TOKENIZER_FILE, spec.prompt, max_ticket_tokens=spec.max_ticket_tokens, truncate=spec.truncate
    )
    return tokenize_tickets(folder / TICKETS, folder / TOKENS, folder / REJECTED, tokenizer)


def find_scored(folder: Path, store: Path) -> StoredSummary:
    """How many of the run's distinct tickets an earlier run scored; these never enter a bucket."""
    known, summary = read_store(store, read_spec(folder).score_key)
    wanted = pl.read_parquet(folder / TOKENS, columns=[TICKET_KEY], glob=False).unique()
    used = known.filter(pl.col(REASON).is_null()).join(wanted, on=TICKET_KEY, how="semi")
    used.write_parquet(folder / STORED)
    return StoredSummary(len(used), summary.parts, summary.rejected_parts)


def plan(folder: Path, *, batch_size: int | None, max_buckets: int) -> BucketPlan:
    """Buckets of the tickets that still need scores, written to the working folder."""
    spec = read_spec(folder)
    rule = PlanRule(
        padded=spec.execution == "padded",
        token_budget=spec.token_budget,
        batch_size=1 if spec.execution == "sequential" else batch_size,
        extra_tokens=spec.extra_tokens,
    )
    known = pl.read_parquet(folder / STORED, glob=False) if (folder / STORED).is_file() else empty_scores()
    made = write_buckets(folder / TOKENS, known, folder / BUCKETS, rule, max_buckets)
    (folder / BUCKETS / "plan.json").write_text(json.dumps([asdict(bucket) for bucket in made.buckets]))
    return made


def gather(folder: Path, store: Path, source: str) -> GatherSummary:
    """Write ``predictions.parquet`` of a run, and add tickets that could not be scored to its quarantine.

    Args:
        folder: The working folder.
        store: Where the buckets' parts are.
        source: The input table, for the whole rows of late rejections.

    Raises:
        ScoringError: A bucket's part is missing or damaged, or a ticket has no score.
    """
    spec = read_spec(folder)
    buckets = [Bucket(**fields) for fields in json.loads((folder / BUCKETS / "plan.json").read_text())]
    frames = [pl.read_parquet(folder / STORED, glob=False)] if (folder / STORED).is_file() else []
    for bucket in buckets:
        part = read_part(part_path(store, spec.score_key, bucket.content_key), spec.score_key)
        if part is None:
            raise ScoringError(
                f"The scores of bucket {bucket.index} are missing or damaged. Run again: only it is redone."
            )
        frames.append(part)
    same_types = [frame.with_columns(pl.col(LOG_PROBS).cast(pl.List(pl.Float32))) for frame in frames]
    scores = pl.concat(same_types).unique(TICKET_KEY, keep="any") if same_types else empty_scores()
    tokens = pl.scan_parquet(folder / TOKENS, glob=False).select(pl.exclude(TOKEN_IDS)).collect()
    where = bucket_of_tickets([Path(bucket.path) for bucket in buckets])
    predictions, failed = gather_predictions(tokens, scores, where, spec.labels)
    predictions.write_parquet(folder / PREDICTIONS_FILE)
    late = pl.read_parquet(folder / REJECTED, columns=[INPUT_INDEX, REASON], glob=False)
    pl.concat([late, failed]).sort(INPUT_INDEX).write_parquet(folder / FAILED)
    if len(late) + len(failed):
        quarantine_late(source, folder, folder / FAILED)
    return summarise(predictions, failed, spec.labels)


def rescore(folder: Path, sample: pl.DataFrame) -> pl.DataFrame:
    """The reference's answers for sampled predictions, one ticket at a time.

    Args:
        folder: The run's working folder.
        sample: Rows of the predictions; the first column is the id. Ids that are not in the input are
            left out: the contract's coverage reports them.

    Returns:
        ``sample`` with ``reference_label`` and ``reference_log_probs`` (float32 list, labels in order).
    """
    spec, engine = read_spec(folder), load_engine(folder)
    id_column = sample.columns[0]
    tokens = pl.scan_parquet(folder / TOKENS, glob=False).select(id_column, TOKEN_IDS)
    wanted = tokens.join(sample.lazy().select(id_column), on=id_column, how="semi").collect()
    ids = sample.select(id_column).join(wanted, on=id_column, how="inner", validate="1:1", maintain_order="left")
    sample = sample.join(ids.select(id_column), on=id_column, how="semi", maintain_order="left")
    with ThreadPoolExecutor(spec.workers) as pool:
        rows = list(pool.map(engine.reference, [row.to_numpy() for row in ids[TOKEN_IDS]]))
    return sample.with_columns(
        pl.Series("reference_label", [spec.labels[int(row.argmax())] for row in rows], dtype=pl.String),
        pl.Series("reference_log_probs", [row.tolist() for row in rows], dtype=pl.List(pl.Float32)),
    )
