"""Buckets on disk: the tickets still to be scored, sorted, batched and written one file a bucket."""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq

from ticket_engine.bucketing import (
    PUBLISHED_BATCH_SIZE,
    PlanRule,
    padding_overhead,
    plan_batches,
    plan_buckets,
    positions,
)
from ticket_engine.parts import content_key
from ticket_engine.schemas import BATCH_INDEX, BUCKET_INDEX, TEXT, TICKET_KEY, TOKEN_IDS, TOKEN_LENGTH

CHUNK_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Bucket:
    """One mapped task's work. Lengths are tokens of the tickets without prompt."""

    index: int
    path: str
    content_key: str
    tickets: int
    batches: int
    shortest: int
    longest: int
    real_tokens: int


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """All buckets of a run, and what the plan costs.

    Attributes:
        buckets: Longest tickets first.
        tickets: Tickets of the table.
        distinct: Different texts among them; each is scored once.
        stored: Different texts whose scores an earlier run left.
        by_text: Different texts that the text stage of a head decided; they need no model.
        batches: Forward passes to do.
        positions: Token positions of those passes, padding included.
        real_positions: The same without padding.
        padding_overhead: ``positions / real_positions - 1``.
        padding_overhead_published: What fixed batches of 32 sorted tickets of this table would pad.
        padding_overhead_longest: What padding every ticket to the longest would pad.
    """

    buckets: tuple[Bucket, ...]
    tickets: int
    distinct: int
    stored: int
    batches: int
    positions: int
    real_positions: int
    padding_overhead: float
    padding_overhead_published: float
    padding_overhead_longest: float
    by_text: int = 0

    def summary(self) -> dict:
        """For the manifest: all but the list of buckets, and their number."""
        fields = {key: value for key, value in asdict(self).items() if key != "buckets"}
        return fields | {"buckets": len(self.buckets)}


def write_buckets(tokens: Path, known: pl.DataFrame, folder: Path, rule: PlanRule, max_buckets: int) -> BucketPlan:
    """Plan the tickets whose key is not known yet and write each bucket's tickets into ``folder``.

    Args:
        tokens: Table with ``ticket_key``, ``token_length`` and ``token_ids``.
        known: Tickets scored before, by ``ticket_key``.
        folder: For the bucket files; made if missing.
        rule: How batches are planned.
        max_buckets: Most buckets.
    """
    lengths = pl.read_parquet(tokens, columns=[TICKET_KEY, TOKEN_LENGTH], glob=False).with_row_index("row")
    distinct = lengths.unique(TICKET_KEY, keep="first", maintain_order=True)
    work = distinct.join(known.select(TICKET_KEY), on=TICKET_KEY, how="anti", maintain_order="left")
    work = work.sort([TOKEN_LENGTH, "row"], descending=[True, False])
    widths = work[TOKEN_LENGTH].to_numpy().astype(np.int64)
    starts = plan_batches(widths, rule)
    batch_of = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(widths)))
    bucket_of = plan_buckets(starts, len(widths), max_buckets)[batch_of]
    work = work.with_columns(
        pl.Series(BATCH_INDEX, batch_of, dtype=pl.UInt32), pl.Series(BUCKET_INDEX, bucket_of, dtype=pl.UInt32)
    )
    folder.mkdir(parents=True, exist_ok=True)
    _write_files(tokens, work, folder)
    table = np.sort(lengths[TOKEN_LENGTH].to_numpy().astype(np.int64))[::-1]
    fixed = plan_batches(table, PlanRule(padded=True, token_budget=2**62, batch_size=PUBLISHED_BATCH_SIZE))
    done = positions(widths, starts, rule)
    real = int(widths.sum()) + rule.extra_tokens * len(widths)
    return BucketPlan(
        buckets=tuple(_describe(part, folder) for part in work.partition_by(BUCKET_INDEX, maintain_order=True)),
        tickets=len(lengths),
        distinct=len(distinct),
        stored=len(distinct) - len(work),
        batches=len(starts),
        positions=done,
        real_positions=real,
        padding_overhead=done / real - 1 if real else 0.0,
        padding_overhead_published=padding_overhead(table, fixed),
        padding_overhead_longest=padding_overhead(table, np.zeros(min(1, len(table)), dtype=np.int64)),
    )


def bucket_path(folder: Path, index: int) -> Path:
    """Where a bucket's tickets lie."""
    return folder / f"{index:04d}.parquet"


def read_bucket(path: str) -> pl.DataFrame:
    """A bucket's tickets in the order of its batches, longest first."""
    return pl.read_parquet(path, glob=False).sort([BATCH_INDEX, TOKEN_LENGTH, "row"], descending=[False, True, False])


def _describe(part: pl.DataFrame, folder: Path) -> Bucket:
    index = int(part[BUCKET_INDEX][0])
    return Bucket(
        index=index,
        path=str(bucket_path(folder, index)),
        content_key=content_key(part[TICKET_KEY].to_list()),
        tickets=len(part),
        batches=part[BATCH_INDEX].n_unique(),
        shortest=int(part[TOKEN_LENGTH].min()),
        longest=int(part[TOKEN_LENGTH].max()),
        real_tokens=int(part[TOKEN_LENGTH].sum()),
    )


def _write_files(tokens: Path, work: pl.DataFrame, folder: Path) -> None:
    """Stream the token ids once through the table and append each row to its bucket's file."""
    writers: dict[int, pq.ParquetWriter] = {}
    row = 0
    try:
        file = pq.ParquetFile(tokens)
        columns = [name for name in (TICKET_KEY, TOKEN_IDS, TEXT) if name in file.schema_arrow.names]
        for batch in file.iter_batches(CHUNK_ROWS, columns=columns):
            chunk = pl.from_arrow(batch).with_row_index("row", offset=row).drop(TICKET_KEY)
            row += len(chunk)
            placed = work.join(chunk, on="row", how="inner")
            for (index,), part in placed.partition_by(BUCKET_INDEX, as_dict=True).items():
                table = part.drop(BUCKET_INDEX).to_arrow()
                if index not in writers:
                    writers[index] = pq.ParquetWriter(bucket_path(folder, index), table.schema, compression="zstd")
                writers[index].write_table(table)
    finally:
        for writer in writers.values():
            writer.close()
