"""Tickets with labels that people gave: read, checked against the label set, reviewed rows put in."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import polars as pl

from ticket_engine.errors import InputError, LabelsError
from ticket_engine.reading import read_tickets
from ticket_engine.schemas import INPUT_INDEX, TICKET_KEY
from ticket_engine.sources import TicketTable, open_table, type_name

GOLD_FILE: Final = "gold.parquet"
LABEL_INDEX: Final = "label_index"
_MERGED_FILE: Final = "merged.parquet"
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class LabelledSummary:
    """What reading labelled tickets gave; counts of rows."""

    rows: int
    tickets: int
    quarantined: int
    labelled: int
    replaced: int
    label_counts: dict[str, int]


def read_labelled(
    source: str,
    folder: Path,
    *,
    id_column: str,
    text_columns: tuple[str, ...],
    label_column: str,
    labels: tuple[str, ...],
    add: str | None = None,
    limit: int | None = None,
) -> LabelledSummary:
    """Write ``tickets.parquet`` as a run does, and ``gold.parquet`` (input_index, label_index) for its labelled rows.

    Args:
        source: See `sources.open_table`.
        folder: Working folder.
        id_column: As for a run.
        text_columns: As for a run.
        label_column: Label names; null or blank where nobody gave one.
        labels: Allowed names, in order.
        add: A table with the same columns; its labelled rows stand in for rows of the same id and come last.
        limit: Only the first rows of ``source``.

    Raises:
        InputError: A table cannot be read, or a column is missing or of the wrong type.
        LabelsError: A label is not in the label set.
    """
    replaced = 0
    if add is not None:
        merged, replaced = _merge(source, add, (id_column, text_columns, label_column), limit=limit)
        source, limit = str(folder / _MERGED_FILE), None
        merged.write_parquet(source)
    table = open_table(source)
    gold = _read_labels(table, label_column, labels, limit)
    summary = read_tickets(source, folder, id_column=id_column, text_columns=text_columns, limit=limit)
    tickets = pl.read_parquet(folder / "tickets.parquet", columns=[INPUT_INDEX])
    known = tickets.join(gold, on=INPUT_INDEX, how="inner", validate="1:1").sort(INPUT_INDEX)
    known.write_parquet(folder / GOLD_FILE)
    counts = known[LABEL_INDEX].value_counts()
    by_index = dict(zip(counts[LABEL_INDEX], counts["count"], strict=True))
    return LabelledSummary(
        rows=summary.rows,
        tickets=summary.tickets,
        quarantined=summary.quarantined,
        labelled=len(known),
        replaced=replaced,
        label_counts={name: int(by_index.get(index, 0)) for index, name in enumerate(labels)},
    )


def hash_rows(ticket_keys: pl.Series, label_indices: pl.Series) -> str:
    """SHA-256 over which texts have which labels, whatever their order, hexadecimal."""
    rows = pl.DataFrame({TICKET_KEY: ticket_keys, LABEL_INDEX: label_indices}).sort(TICKET_KEY, LABEL_INDEX)
    digest = hashlib.sha256()
    for key, index in rows.iter_rows():
        digest.update(key + index.to_bytes(4, "little", signed=True))
    return digest.hexdigest()


def _read_labels(table: TicketTable, label_column: str, labels: tuple[str, ...], limit: int | None) -> pl.DataFrame:
    """Input index and label index of the rows that have a label."""
    if label_column not in table.schema:
        raise InputError(
            f"{table.name} has no column {label_column!r} with labels. Choose another with --label-column."
        )
    if table.schema[label_column] not in (pl.String, pl.Categorical, pl.Enum, pl.Null):
        raise InputError(
            f"The label column {label_column!r} of {table.name} is {type_name(table.schema[label_column])}. "
            "Allowed: String with the label names of the labels file."
        )
    names = table.read([label_column], rows=limit)[label_column].cast(pl.String).str.strip_chars()
    rows = pl.DataFrame({INPUT_INDEX: pl.int_range(len(names), dtype=pl.UInt32, eager=True), "name": names})
    rows = rows.filter(pl.col("name").is_not_null() & (pl.col("name") != ""))
    unknown = rows.filter(~pl.col("name").is_in(labels))["name"].unique().sort()
    if len(unknown):
        shown = ", ".join(repr(name[:40]) for name in unknown[:_SHOWN])
        raise LabelsError(
            f"{len(unknown)} labels of {table.name} are not in the labels file: {shown}. "
            f"Allowed: {', '.join(labels[:8])}{', ...' if len(labels) > 8 else ''}. Add them, or leave the rows unlabelled."
        )
    places = pl.DataFrame({"name": labels, LABEL_INDEX: pl.int_range(len(labels), dtype=pl.Int32, eager=True)})
    return rows.join(places, on="name", how="left").select(INPUT_INDEX, LABEL_INDEX)


def _merge(
    source: str, add: str, columns: tuple[str, tuple[str, ...], str], *, limit: int | None
) -> tuple[pl.DataFrame, int]:
    """The first table without the ids that the second labels, then these rows; and how many were replaced.

    Rows of the second table without a label or without text say nothing: they replace nothing.
    """
    id_column, text_columns, label_column = columns
    wanted = list(dict.fromkeys([id_column, *text_columns, label_column]))
    frames = []
    for name in (source, add):
        table = open_table(name)
        missing = [column for column in (id_column, label_column) if column not in table.schema]
        if missing:
            raise InputError(
                f"{table.name} has no column {missing[0]!r}. Both tables need the id and the label column."
            )
        present = [column for column in wanted if column in table.schema]
        if name == add and not set(text_columns) & set(present):
            raise InputError(
                f"{table.name} has none of the text columns {', '.join(text_columns)}: a label without its text "
                "teaches nothing. Give the table with its texts, or name them with --text-columns."
            )
        frames.append(table.read(present, rows=limit if name == source else None))
    first, second = frames
    if first.schema[id_column] != second.schema[id_column]:
        raise InputError(
            f"The id column {id_column!r} is {type_name(first.schema[id_column])} in {source} and "
            f"{type_name(second.schema[id_column])} in {add}. Cast one of them."
        )
    has = {column: _says_something(column, kind) for column, kind in second.schema.items()}
    second = second.filter(has[label_column], pl.any_horizontal([has[c] for c in text_columns if c in has]))
    by_id = pl.selectors.by_name(id_column)
    kept = first.join(second.select(by_id), on=by_id, how="anti", maintain_order="left")
    return pl.concat([kept, second], how="diagonal_relaxed"), len(first) - len(kept)


def _says_something(column: str, kind: pl.DataType) -> pl.Expr:
    values = pl.selectors.by_name(column)
    if kind not in (pl.String, pl.Categorical, pl.Enum):
        return values.is_not_null()  # of a type that is refused later
    return (values.cast(pl.String).str.strip_chars() != "").fill_null(False)
