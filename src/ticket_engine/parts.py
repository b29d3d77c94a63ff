"""One part of a store on disk: scored tickets, written whole, verified when read.

A part is a Parquet file with ``ticket_key``, ``log_probs`` (float32, one a label), ``stage`` (null, or after how many
layers a head decided), ``reason`` (null, or why the ticket could not be scored) and ``used_day`` (days since 1970 of the
last run that used it). Its footer holds the score key, the latest day, and a hash of each row group's content: a torn,
changed or foreign part is not trusted. A part that cannot be read for another reason (too many open files, a disk or
network fault) is an error, and stays.
"""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ticket_engine.errors import StoreError
from ticket_engine.ownership import SCORES, mark
from ticket_engine.schemas import LOG_PROBS, REASON, STAGE, TICKET_KEY, USED_DAY

COLUMNS = (TICKET_KEY, LOG_PROBS, STAGE, REASON)
SUFFIX, UNFINISHED = ".parquet", ".part"
GROUP_ROWS = 8192


class TornError(Exception):
    """Bytes that were read and are not what was written."""


def content_key(ticket_keys: list[bytes]) -> str:
    """Name of the part that holds these tickets, hexadecimal."""
    return hashlib.blake2b(b"".join(sorted(ticket_keys)), digest_size=16).hexdigest()


def part_path(store: Path, score_key: str, key: str) -> Path:
    """Where a bucket's part lies."""
    return store / score_key[:32] / (key + SUFFIX)


def today() -> int:
    """Days since 1970."""
    return int(time.time() // 86400)


def write_part(path: Path, score_key: str, scores: pl.DataFrame | Iterable[pl.DataFrame]) -> None:
    """Write a part atomically: beside its name first, then renamed.

    Args:
        path: From `part_path`.
        score_key: Of the engine's spec.
        scores: ``ticket_key`` (Binary), ``log_probs`` (float32 array or list of one length; NaN where there is a reason),
            ``stage`` (Int16 or null) and ``reason`` (String, null for scored tickets), a row a ticket, and ``used_day``
            where it is not today. One frame or several; no more than a few are in memory at once.
    """
    frames = iter([scores] if isinstance(scores, pl.DataFrame) else scores)

    def write(file: IO[bytes]) -> bool:
        writer, hashes, newest = None, [], 0
        for frame in frames:
            for piece in frame.iter_slices(GROUP_ROWS) if len(frame) else ():
                table = _as_table(piece)
                writer = writer or pq.ParquetWriter(file, table.schema, compression="zstd")
                writer.write_table(table, row_group_size=GROUP_ROWS)
                hashes.append(_content_hash(table))
                newest = max(newest, int(piece[USED_DAY].max()) if USED_DAY in piece.columns else today())
        if writer is None:
            return False
        footer = {"score_key": score_key, "content": json.dumps(hashes), "newest_day": str(newest)}
        writer.add_key_value_metadata(footer)
        writer.close()
        return True

    write_whole(path, write)


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Beside its name first, then renamed; not at all where ``write`` says False: there is nothing to keep."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mark(path.parent, SCORES)
    handle, staged = tempfile.mkstemp(dir=path.parent, suffix=UNFINISHED)
    try:
        with os.fdopen(handle, "wb") as file:
            is_whole = write(file) is not False
            file.flush()
            os.fsync(file.fileno())
        if is_whole:
            os.replace(staged, path)
        else:
            os.unlink(staged)
    except BaseException:
        Path(staged).unlink(missing_ok=True)
        raise


class Part:
    """An open part, read a row group at a time. Closed at the end of a ``with``."""

    def __init__(self, path: Path, score_key: str | None) -> None:
        """Open it and read its footer.

        Args:
            path: Of the part.
            score_key: That it must have; None for any.

        Raises:
            FileNotFoundError: It is not there.
            StoreError: It is there and could not be read.
            TornError: It is torn, or of another engine.
        """
        self.path = path
        self._handle = _reading(path, lambda: path.open("rb"))
        try:
            self._file = _reading(path, lambda: pq.ParquetFile(self._handle))
            metadata = self._file.metadata.metadata or {}
            self.score_key = metadata[b"score_key"].decode()
            scores = self._file.schema_arrow.field(LOG_PROBS).type
            if score_key not in (None, self.score_key) or not pa.types.is_fixed_size_list(scores):
                raise TornError("of another engine")
            self._schema = _schema(scores.list_size)
            self._hashes = json.loads(metadata[b"content"])
            self.newest_day = int(metadata[b"newest_day"])
            self.rows, self.groups = self._file.metadata.num_rows, self._file.num_row_groups
            if not isinstance(self._hashes, list) or len(self._hashes) != self.groups:
                raise TornError("of another number of row groups")
        except (KeyError, ValueError, TypeError) as error:
            self._handle.close()
            raise TornError(str(error)) from error
        except BaseException:
            self._handle.close()
            raise

    def __enter__(self) -> "Part":
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.close()

    def keys(self, group: int) -> pl.Series:
        """The ticket keys of a row group, not yet verified."""
        table = _reading(self.path, lambda: self._file.read_row_group(group, columns=[TICKET_KEY]))
        keys = pl.from_arrow(table)
        if keys.columns != [TICKET_KEY] or keys.schema[TICKET_KEY] != pl.Binary:
            raise TornError("without keys")
        return keys.to_series()

    def read(self, group: int) -> pl.DataFrame:
        """A row group, verified.

        Raises:
            TornError: Its content is not what was written.
        """
        table = _reading(self.path, lambda: self._file.read_row_group(group).cast(self._schema))
        if _content_hash(table) != self._hashes[group]:
            raise TornError("changed")
        return pl.from_arrow(table)

    def frames(self) -> Iterator[pl.DataFrame]:
        """All row groups, verified."""
        for group in range(self.groups):
            yield self.read(group)


def read_part(path: Path, score_key: str) -> pl.DataFrame | None:
    """The tickets of a part, or None if it is missing, torn, changed or of another engine.

    Raises:
        StoreError: It is there and could not be read; it may be whole, and stays.
    """
    try:
        with Part(path, score_key) as part:
            return pl.concat(part.frames()).drop(USED_DAY)
    except (FileNotFoundError, TornError):
        return None


def unreadable(path: Path, error: OSError) -> StoreError:
    """The error of a part or folder that is there and cannot be read."""
    return StoreError(
        f"The stored scores in {path} cannot be read ({error.strerror or type(error).__name__}). Nothing was "
        "removed. Run again when the fault is gone, or name another --store."
    )


def _reading(path: Path, read: Callable[[], object]):
    """What ``read`` gives; faults of the file told from damage of its bytes, which pyarrow calls OSError too."""
    try:
        return read()
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno is not None:
            raise unreadable(path, error) from error
        raise TornError(str(error)) from error
    except (ValueError, pa.ArrowException, IndexError) as error:  # ValueError: bytes that are no longer UTF-8
        raise TornError(str(error)) from error


def _as_table(scores: pl.DataFrame) -> pa.Table:
    log_probs = scores[LOG_PROBS]
    width = log_probs.dtype.size if isinstance(log_probs.dtype, pl.Array) else len(log_probs[0])
    flat = log_probs.explode(empty_as_null=False).cast(pl.Float32).to_numpy()
    days = scores[USED_DAY] if USED_DAY in scores.columns else pl.repeat(today(), len(scores), eager=True)
    schema = _schema(width)
    columns = [scores[name].to_arrow() for name in (TICKET_KEY, STAGE, REASON)] + [days.to_arrow()]
    key, stage, reason, day = (
        column.cast(schema.field(name).type)
        for column, name in zip(columns, (TICKET_KEY, STAGE, REASON, USED_DAY), strict=True)
    )
    return pa.table([key, pa.FixedSizeListArray.from_arrays(pa.array(flat), width), stage, reason, day], schema=schema)


def _schema(labels: int) -> pa.Schema:
    types = (pa.binary(), pa.list_(pa.float32(), labels), pa.int16(), pa.string(), pa.int32())
    return pa.schema(list(zip((*COLUMNS, USED_DAY), types, strict=True)))


def _content_hash(table: pa.Table) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in (*COLUMNS, USED_DAY):
        values = table.column(name)
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], values.type)
        if pa.types.is_fixed_size_list(values.type):
            digest.update(values.flatten().to_numpy().tobytes())
        elif pa.types.is_integer(values.type):
            digest.update(values.cast(pa.int64()).fill_null(-1).to_numpy().tobytes())
        else:
            digest.update(pc.binary_length(values).fill_null(-1).to_numpy().tobytes())
            digest.update(b"".join(values.cast(pa.binary()).fill_null(b"").to_pylist()))
    return digest.hexdigest()
