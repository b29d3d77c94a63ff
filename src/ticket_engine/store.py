"""Scored tickets on disk, kept between runs: parts written whole, verified when read.

A part is a Parquet file ``STORE/SCORE_KEY/CONTENT_KEY.parquet`` with ``ticket_key``, ``log_probs``
(float32, one a label), ``stage`` (null, or after how many layers a head decided) and ``reason`` (null, or why
the ticket could not be scored). Its metadata holds
the score key and a hash of its content: a torn, changed or foreign part is not trusted. A part that cannot be
read for another reason (too many open files, a disk or network fault) is an error, and stays. The folder of a score
key carries the mark of `ownership`; nothing is removed that has no mark above it or another name than a part's.
"""

import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from ticket_engine.errors import StoreError
from ticket_engine.ownership import SCORES, is_marked, mark
from ticket_engine.schemas import LOG_PROBS, REASON, STAGE, TICKET_KEY

COLUMNS = (TICKET_KEY, LOG_PROBS, STAGE, REASON)
SUFFIX, UNFINISHED = ".parquet", ".part"
FORMATS = "number-formats"
_OURS = re.compile(r"[0-9a-f]{32}\.(parquet|json)|tmp\w+\.part")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredSummary:
    """What a store held for a run: tickets known, parts used, and parts that were not trusted."""

    tickets: int
    parts: int
    rejected_parts: int


def content_key(ticket_keys: list[bytes]) -> str:
    """Name of the part that holds these tickets, hexadecimal."""
    return hashlib.blake2b(b"".join(sorted(ticket_keys)), digest_size=16).hexdigest()


def part_path(store: Path, score_key: str, key: str) -> Path:
    """Where a part lies."""
    return store / score_key[:32] / (key + SUFFIX)


def write_part(path: Path, score_key: str, scores: pl.DataFrame) -> None:
    """Write a part atomically: beside its name first, then renamed.

    Args:
        path: From `part_path`.
        score_key: Of the engine's spec.
        scores: ``ticket_key`` (Binary), ``log_probs`` (float32 array; NaN where there is a reason), ``stage``
            (Int16 or null) and ``reason`` (String, null for scored tickets), a row a ticket.
    """
    log_probs = scores[LOG_PROBS].to_numpy()
    table = pa.table(
        {
            TICKET_KEY: scores[TICKET_KEY].to_list(),
            LOG_PROBS: pa.FixedSizeListArray.from_arrays(pa.array(log_probs.reshape(-1)), log_probs.shape[1]),
            STAGE: scores[STAGE].to_list(),
            REASON: scores[REASON].to_list(),
        },
        schema=_schema(log_probs.shape[1]),
    )
    table = table.replace_schema_metadata({"score_key": score_key, "content": _content_hash(table)})
    _write_whole(path, lambda file: pq.write_table(table, file, compression="zstd"))


def read_format(store: Path, key: str) -> str | None:
    """The number format that earlier runs of the same kind used; None if there is none.

    Args:
        store: The store.
        key: Hash of all but the format that decides a score, hexadecimal.
    """
    try:
        return json.loads((store / FORMATS / f"{key[:32]}.json").read_text(encoding="utf-8"))["dtype"]
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    except OSError as error:
        raise _unreadable(store, error) from error


def write_format(store: Path, key: str, dtype: str) -> None:
    """Note the number format for later runs of the same kind; it ages like a part."""
    content = json.dumps({"dtype": dtype}).encode()
    _write_whole(store / FORMATS / f"{key[:32]}.json", lambda file: file.write(content))


def _write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Beside its name first, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mark(path.parent, SCORES)
    handle, staged = tempfile.mkstemp(dir=path.parent, suffix=UNFINISHED)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
    except BaseException:
        Path(staged).unlink(missing_ok=True)
        raise


def read_part(path: Path, score_key: str) -> pl.DataFrame | None:
    """The tickets of a part, or None if it is missing, torn, changed or of another engine.

    Raises:
        StoreError: It is there and could not be read; it may be whole, and stays.
    """
    try:
        content = pa.py_buffer(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        table = pq.read_table(pa.BufferReader(content))
        metadata = table.schema.metadata or {}
        if metadata.get(b"score_key") != score_key.encode() or table.column_names != list(COLUMNS):
            return None
        scores = table.schema.field(LOG_PROBS).type
        if not pa.types.is_fixed_size_list(scores):
            return None
        table = table.cast(_schema(scores.list_size))  # a damaged file may carry other types or names
        if metadata.get(b"content") != _content_hash(table).encode():
            return None
    except (OSError, ValueError, pa.ArrowException):  # of bytes in memory: a damaged page is an OSError of pyarrow's
        return None
    return pl.from_arrow(table)


def read_store(store: Path, score_key: str) -> tuple[pl.DataFrame, StoredSummary]:
    """All trusted tickets of one score key, each once, and what was found.

    Parts that are used get a new time of change, so that `clean_store` keeps them.
    """
    frames, rejected = [], 0
    for path in sorted(_parts(store / score_key[:32])):
        frame = read_part(path, score_key)
        if frame is None:
            rejected += 1
            log.warning("A stored part is torn or foreign and is done again: %s", path.name)
            path.unlink(missing_ok=True)
            continue
        os.utime(path)
        frames.append(frame)
    if not frames:
        return empty_scores(), StoredSummary(0, 0, rejected)
    known = pl.concat(frames).unique(TICKET_KEY, keep="first")
    return known, StoredSummary(len(known), len(frames), rejected)


def empty_scores() -> pl.DataFrame:
    """A table of scores without rows."""
    types = (pl.Binary, pl.List(pl.Float32), pl.Int16, pl.String)
    return pl.DataFrame(schema=dict(zip(COLUMNS, types, strict=True)))


def clean_store(store: Path, days: int) -> int:
    """Delete parts, and leavings of killed writers, that no run used for so many days; their number."""
    limit, removed = time.time() - days * 86400, 0
    for folder in store.glob("*/"):
        for path in _own_files(folder):
            with suppress(FileNotFoundError):  # another run cleans this store too
                if path.stat().st_mtime < limit:
                    path.unlink()
                    removed += 1
    return removed


def _own_files(folder: Path) -> list[Path]:
    """Parts of a marked folder, and leavings of killed writers."""
    try:
        if not is_marked(folder, SCORES):
            return []
        return [path for path in folder.iterdir() if _OURS.fullmatch(path.name)]
    except OSError as error:
        raise _unreadable(folder, error) from error


def _unreadable(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"The stored scores in {path} cannot be read ({error.strerror or type(error).__name__}). Nothing was "
        "removed. Run again when the fault is gone, or name another --store."
    )


def _parts(folder: Path) -> list[Path]:
    return [path for path in _own_files(folder) if path.suffix == SUFFIX]


def _schema(labels: int) -> pa.Schema:
    types = (pa.binary(), pa.list_(pa.float32(), labels), pa.int16(), pa.string())
    return pa.schema(list(zip(COLUMNS, types, strict=True)))


def _content_hash(table: pa.Table) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for column in COLUMNS:
        values = table.column(column).combine_chunks()
        if isinstance(values, pa.ChunkedArray):
            values = pa.concat_arrays(values.chunks)
        if pa.types.is_fixed_size_list(values.type):
            digest.update(values.flatten().to_numpy().tobytes())
        else:
            for value in values.to_pylist():
                data = str(value).encode() if isinstance(value, str | int) else value or b"-"
                digest.update(len(data).to_bytes(4, "little") + data)
    return digest.hexdigest()
