"""From the caller's table to tickets that can be classified, and to quarantine for the rows that cannot.

A table is read in slices: once for the ids, once more for the texts, and only where rows are rejected a third time,
for these rows whole. Every row has one outcome, so ``rows == tickets + quarantined``.
"""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import polars as pl
import pyarrow.parquet as pq

from ticket_engine.errors import InputError
from ticket_engine.schemas import (
    ID_TYPES,
    INPUT_INDEX,
    OUTPUT_COLUMNS,
    QUARANTINE_FILE,
    REASON,
    REASON_NO_TEXT,
    REASON_NULL_ID,
    REASON_REPEATED_ID,
    TEXT,
    TICKET_ID,
)
from ticket_engine.sources import TicketTable, open_table, type_name

COLUMNS_FILE: Final = "columns.json"
TICKETS_FILE: Final = "tickets.parquet"
UNREAD_FILE: Final = "unread.parquet"
SLICE_BYTES: Final = 32 * 2**20
# Measured on 1.6 million texts of 1.2 kB: peak 0.5 GB (160 MB a slice: 1.4 GB). A file of one row group is decoded once
# a slice: 1 million tickets of 570 bytes took 20 s that way, and 3.5 s in row groups of 125,000.
FIRST_ROWS: Final = 8_192
MOST_ROWS: Final = 131_072
QUARANTINE_ROWS: Final = 16_384
ROW_GROUP_ROWS: Final = 16_384
OPTIONAL_TEXT_COLUMN: Final = "subject"
_SHOWN_COLUMNS = 8


@dataclass(frozen=True, slots=True)
class InputColumns:
    """The input's columns: which is the id, which hold text, and the type of each, in order."""

    id_column: str
    text_columns: tuple[str, ...]
    types: dict[str, str]


@dataclass(frozen=True, slots=True)
class ReadSummary:
    """What reading a table gave.

    ``rows`` is the table's own count. ``reasons`` counts the quarantined rows by reason, zeros included. ``text_characters`` holds ``min``, ``mean``,
    ``p95`` and ``max`` of the tickets' text lengths in characters, zeros if there are none.
    """

    rows: int
    tickets: int
    quarantined: int
    reasons: dict[str, int]
    id_type: str
    text_columns: tuple[str, ...]
    text_characters: dict[str, float]


def read_tickets(
    source: str, folder: Path, *, id_column: str, text_columns: tuple[str, ...], limit: int | None
) -> ReadSummary:
    """Write the tickets of a table, and apart from them, whole, the rows that cannot be classified.

    A ticket's text is its text columns that are not blank, joined by a line break, without white space at its ends;
    NUL characters become U+FFFD. The reasons for quarantine, the first that holds:

    - ``null id``
    - ``repeated id``: an earlier row, usable or not, has the same id; the first one stands
    - ``no text``: no text column holds anything but white space and NUL characters

    Args:
        source: See `sources.open_table`.
        folder: The run's working folder. ``tickets.parquet`` (``ticket_id`` in its own type, ``input_index`` uint32: the
            row's place in the input, ``text``; input order) and ``quarantine.parquet`` (see `write_quarantine`) are
            written there, ``unread.parquet`` (``ticket_id``, ``input_index``, ``reason``) for `quarantine_late`, and
            ``columns.json`` for `read_columns`.
        id_column: String or whole numbers.
        text_columns: String, Categorical, Enum, or without any value. Only ``subject`` may be missing, as long as
            another one is there.
        limit: Only the first rows of the table; ``None`` for all.

    Raises:
        InputError: The table cannot be read to its end, or a column is missing or of the wrong type.
    """
    table = open_table(source)
    texts = _check_columns(table, id_column, text_columns)
    types = {name: str(kind)[:100] for name, kind in table.schema.items()}
    columns = {"id_column": id_column, "text_columns": texts, "types": types}
    (folder / COLUMNS_FILE).write_text(json.dumps(columns), encoding="utf-8")
    rows = table.count_rows() if limit is None else min(limit, table.count_rows())
    ids = table.read([id_column], rows=limit).to_series().alias("id")  # Series methods take ^x$ for a pattern
    if len(ids) != rows:
        raise InputError(f"{table.name} gave {len(ids)} of its {rows} rows. Run again when nothing writes to it.")
    repeated = ids.is_first_distinct().not_()
    rejected, lengths = [], []
    empty = _judge(table.schema.to_frame(), id_column, texts, repeated=repeated.clear(), start=0)
    schema = empty.drop(REASON).to_arrow().schema
    with pq.ParquetWriter(folder / TICKETS_FILE, schema, compression="zstd") as tickets:
        for start, chunk in _slices(table, list(dict.fromkeys([id_column, *texts])), len(ids)):
            _check_unchanged(table, chunk[id_column], ids.slice(start, len(chunk)))
            judged = _judge(chunk, id_column, texts, repeated=repeated.slice(start, len(chunk)), start=start)
            kept = judged.filter(pl.col(REASON).is_null()).drop(REASON)
            tickets.write_table(kept.to_arrow().cast(schema), row_group_size=ROW_GROUP_ROWS)
            lengths.append(kept[TEXT].str.len_chars())
            rejected.append(judged.filter(pl.col(REASON).is_not_null()).drop(TEXT))
    unread = pl.concat(rejected or [empty.drop(TEXT)])
    unread.write_parquet(folder / UNREAD_FILE)
    write_quarantine(table, folder, unread)
    return ReadSummary(
        rows=rows,
        tickets=len(ids) - len(unread),
        quarantined=len(unread),
        reasons={
            reason: int((unread[REASON] == reason).sum())
            for reason in (REASON_NULL_ID, REASON_REPEATED_ID, REASON_NO_TEXT)
        },
        id_type=str(ids.dtype),
        text_columns=tuple(texts),
        text_characters=_spread(pl.concat(lengths) if lengths else pl.Series([], dtype=pl.UInt32)),
    )


def read_columns(folder: Path) -> InputColumns:
    """The input's columns, as `read_tickets` noted them in a run's folder."""
    fields = json.loads((folder / COLUMNS_FILE).read_text(encoding="utf-8"))
    return InputColumns(fields["id_column"], tuple(fields["text_columns"]), fields["types"])


def write_quarantine(table: TicketTable, folder: Path, rejected: pl.DataFrame) -> None:
    """Write ``quarantine.parquet``: the input rows of rejected tickets, whole, and ``reason``, in input order.

    The table's own columns keep names and types, except that one named ``reason`` is called ``input_reason``.

    Args:
        table: The input.
        folder: The run's working folder.
        rejected: ``ticket_id``, ``input_index`` and ``reason``.

    Raises:
        InputError: The table cannot be read, or is not the one that was read before.
    """
    columns = list(table.schema)
    own_names = _names_beside_reason(columns)
    parts = folder / "quarantine"
    shutil.rmtree(parts, ignore_errors=True)  # of an attempt that failed half-way
    parts.mkdir()
    for number, (chunk, rows) in enumerate(_rows_at(table, columns, rejected, read_columns(folder).id_column)):
        rows.columns = own_names
        rows.with_columns(chunk[REASON]).write_parquet(parts / f"{number:06}.parquet")
    if len(rejected):
        pl.scan_parquet(parts, glob=False).sink_parquet(folder / QUARANTINE_FILE, engine="streaming")
    else:
        schema = dict(zip(own_names, table.schema.values(), strict=True)) | {REASON: pl.String()}
        pl.DataFrame(schema=schema).write_parquet(folder / QUARANTINE_FILE)
    shutil.rmtree(parts)


def read_texts(source: str, folder: Path, wanted: pl.DataFrame) -> pl.DataFrame:
    """The text columns of some tickets as the table has them, in input order.

    Args:
        source: As given to `read_tickets`.
        folder: The run's working folder, in which `read_tickets` wrote.
        wanted: ``ticket_id`` and ``input_index``.

    Raises:
        InputError: The table cannot be read any more, or has changed since.
    """
    table, known = open_table(source), read_columns(folder)
    columns = list(dict.fromkeys([known.id_column, *known.text_columns]))
    frames = [rows for _, rows in _rows_at(table, columns, wanted, known.id_column)]
    found = pl.concat(frames) if frames else table.schema.to_frame()
    return found.select(pl.selectors.by_name(known.text_columns))


def _rows_at(
    table: TicketTable, columns: list[str], wanted: pl.DataFrame, id_column: str
) -> Iterator[tuple[pl.DataFrame, pl.DataFrame]]:
    """Chunks of ``wanted`` (``ticket_id`` and ``input_index``) in input order, each with its input rows."""
    chunks = wanted.sort(INPUT_INDEX).group_by(pl.col(INPUT_INDEX) // QUARANTINE_ROWS, maintain_order=True)
    for _, chunk in chunks:
        start = chunk[INPUT_INDEX][0]
        rows = table.read(columns, start=start, rows=chunk[INPUT_INDEX][-1] - start + 1)
        rows = rows[chunk[INPUT_INDEX] - start] if len(rows) > chunk[INPUT_INDEX][-1] - start else rows.clear()
        _check_unchanged(table, rows[id_column], chunk[TICKET_ID])
        yield chunk, rows


def quarantine_late(source: str, folder: Path, failed: Path) -> int:
    """Write the quarantine again, with the tickets that were rejected after reading; the rows in it.

    Args:
        source: As given to `read_tickets`.
        folder: The run's working folder, in which `read_tickets` wrote.
        failed: Parquet with ``input_index`` and ``reason`` of tickets that could not be tokenized or scored.

    Raises:
        InputError: The table cannot be read any more, or has changed since.
    """
    unread = pl.read_parquet(folder / UNREAD_FILE, glob=False)
    late = pl.read_parquet(failed, columns=[INPUT_INDEX, REASON], glob=False)
    if late.is_empty():
        return len(unread)
    tickets = pl.scan_parquet(folder / TICKETS_FILE, glob=False).drop(TEXT)
    known = tickets.join(late.lazy(), on=INPUT_INDEX, how="inner", validate="1:1").collect()
    rejected = pl.concat([unread, known.select(unread.columns)])
    write_quarantine(open_table(source), folder, rejected)
    return len(rejected)


def _check_columns(table: TicketTable, id_column: str, text_columns: tuple[str, ...]) -> list[str]:
    """The text columns that the table has; raises `InputError` if it lacks one, or a type is not allowed."""
    if id_column in OUTPUT_COLUMNS:
        raise InputError(f"The id column cannot be named {id_column!r}: the results use that name. Rename it first.")
    if len(set(text_columns)) < len(text_columns):
        raise InputError(f"--text-columns names a column twice: {', '.join(text_columns)}.")
    present = [column for column in text_columns if column in table.schema]
    optional = {OPTIONAL_TEXT_COLUMN} if present else set()
    missing = [column for column in (id_column, *text_columns) if column not in table.schema.keys() | optional]
    if missing:
        raise InputError(
            f"{table.name} has no column {missing[0]!r}. {_shown_columns(table)} "
            "Choose others with --id-column and --text-columns."
        )
    for column in (id_column, *present):
        if column in table.partitions:
            raise InputError(f"The column {column!r} comes from a folder {column}=... of {table.name}. Name another.")
    id_type = table.schema[id_column]
    if id_type not in ID_TYPES:
        raise InputError(
            f"The id column {id_column!r} of {table.name} is {type_name(id_type)}. "
            "Allowed: String and whole numbers up to 64 bits. Choose another with --id-column, or cast it."
        )
    for column in present:
        if table.schema[column] not in (pl.String, pl.Categorical, pl.Enum, pl.Null):
            raise InputError(
                f"The text column {column!r} of {table.name} is {type_name(table.schema[column])}, not text. "
                "Allowed: String, Categorical, Enum. Choose others with --text-columns, or cast it."
            )
    return present


def _shown_columns(table: TicketTable) -> str:
    names = list(table.schema)
    if not names:
        return "It has no columns."
    more = f", ... ({len(names)} in all)" if len(names) > _SHOWN_COLUMNS else ""
    return f"Its columns: {', '.join(repr(name[:40]) for name in names[:_SHOWN_COLUMNS])}{more}."


def _slices(table: TicketTable, columns: list[str], rows: int) -> Iterator[tuple[int, pl.DataFrame]]:
    """The first ``rows`` rows as consecutive frames of about `SLICE_BYTES`, each with the place of its first row."""
    start, wanted = 0, FIRST_ROWS
    while start < rows:
        chunk = table.read(columns, start=start, rows=min(wanted, MOST_ROWS, rows - start))
        if chunk.is_empty():
            raise _changed(table)
        yield start, chunk
        start += len(chunk)
        wanted = max(1, SLICE_BYTES * len(chunk) // max(1, chunk.estimated_size()))


def _judge(
    chunk: pl.DataFrame, id_column: str, text_columns: list[str], *, repeated: pl.Series, start: int
) -> pl.DataFrame:
    """``ticket_id``, ``input_index``, ``text`` and ``reason`` (null: a ticket) of consecutive rows, the first at ``start``."""
    texts = [pl.selectors.by_name(column).cast(pl.String) for column in text_columns]
    with_content = [pl.when(text.str.contains(r"[^\s\x00]")).then(text) for text in texts]
    joined = pl.concat_str(with_content, separator="\n", ignore_nulls=True).fill_null("")
    ids = pl.selectors.by_name(id_column)
    return chunk.select(
        ids.alias(TICKET_ID),
        pl.int_range(start, start + pl.len(), dtype=pl.UInt32).alias(INPUT_INDEX),
        joined.str.replace_all("\0", "\ufffd", literal=True).str.strip_chars().alias(TEXT),
        pl.when(ids.is_null())
        .then(pl.lit(REASON_NULL_ID))
        .when(repeated)
        .then(pl.lit(REASON_REPEATED_ID))
        .when(joined == "")
        .then(pl.lit(REASON_NO_TEXT))
        .alias(REASON),
    )


def _check_unchanged(table: TicketTable, now: pl.Series, before: pl.Series) -> None:
    if not now.equals(before):
        raise _changed(table)


def _changed(table: TicketTable) -> InputError:
    return InputError(f"{table.name} changed while it was read. Run again when nothing writes to it.")


def _names_beside_reason(columns: list[str]) -> list[str]:
    """Column names of the quarantine, with ``input_`` before the table's own ``reason`` until it is unique."""
    own = REASON
    while own in columns:
        own = f"input_{own}"
    return [own if column == REASON else column for column in columns]


def name_in_quarantine(name: str, columns: list[str]) -> str:
    """What a column of the input is called in a quarantine with these columns."""
    return name if name != REASON else max((c for c in columns if re.fullmatch(r"(input_)+reason", c)), key=len)


def _spread(lengths: pl.Series) -> dict[str, float]:
    values = (lengths.min(), lengths.mean(), lengths.quantile(0.95), lengths.max())
    return {name: float(value or 0) for name, value in zip(("min", "mean", "p95", "max"), values, strict=True)}
