"""The tables and figures that the contracts judge: derived columns of a run's files, never ticket text."""

from pathlib import Path

import numpy as np
import polars as pl

from ticket_engine.reading import ReadSummary, name_in_quarantine, read_columns
from ticket_engine.schemas import (
    ID_TYPES,
    INPUT_INDEX,
    IS_TRUNCATED,
    LABEL,
    LOG_PROBS,
    MARGIN,
    PROBABILITY,
    TEXT,
    TICKET_ID,
    TOKEN_LENGTH,
)

TICKETS_FILE, UNREAD_FILE, TOKENS_FILE = "tickets.parquet", "unread.parquet", "tokens.parquet"
REJECTED_FILE = "rejected.parquet"
CHARACTERS, OUTCOME = "characters", "outcome"
PROBABILITY_SUM, FITS_SCORES = "probability_sum", "fits_scores"
PREDICTED, QUARANTINED, LOST, DOUBLED, STRANGE = "predicted", "quarantined", "lost", "doubled", "not in the input"
NO_LABEL = "(none)"
NOT_A_NUMBER = -1.0  # stands for a missing or non-finite score: Great Expectations leaves nulls out
CHUNK_ROWS = 32_768  # 20 MB of float64 scores for 77 labels
ROUNDING = 1e-4  # of float32 probabilities


def ticket_table(folder: Path) -> pl.DataFrame:
    """``ticket_id``, ``characters``, ``token_length`` and ``is_truncated`` of a run's tickets.

    Both token columns are null for tickets that could not be tokenized.
    """
    tickets = pl.scan_parquet(folder / TICKETS_FILE, glob=False).select(
        TICKET_ID, INPUT_INDEX, pl.col(TEXT).str.len_chars().alias(CHARACTERS)
    )
    tokens = pl.scan_parquet(folder / TOKENS_FILE, glob=False).select(INPUT_INDEX, TOKEN_LENGTH, IS_TRUNCATED)
    joined = tickets.join(tokens, on=INPUT_INDEX, how="left", maintain_order="left")
    return joined.drop(INPUT_INDEX).collect(engine="streaming")


def ticket_figures(table: pl.DataFrame, folder: Path, summary: ReadSummary) -> dict:
    """Figures of the input contract, by the names that a suite uses; a share of nothing is None."""
    tokenized = table[TOKEN_LENGTH].count()
    columns = read_columns(folder)
    texts = ["String", "Categorical", "Enum", "Null"]
    return {
        "rows": summary.rows,
        "tickets": len(table),
        "lost_rows": summary.rows
        - len(table)
        - pl.scan_parquet(folder / UNREAD_FILE).select(pl.len()).collect().item(),
        "quarantined": summary.rows - tokenized,
        "quarantine_rate": (summary.rows - tokenized) / summary.rows if summary.rows else None,
        "truncated": int(table[IS_TRUNCATED].sum()),
        "truncated_rate": table[IS_TRUNCATED].mean(),
        "median_characters": table[CHARACTERS].median(),
        "same_length_rate": table[CHARACTERS].value_counts()["count"].max() / len(table) if len(table) else None,
        "input_columns": columns.types,
        "needed_columns": {columns.id_column: [str(kind()) for kind in ID_TYPES]}
        | dict.fromkeys(columns.text_columns, texts),
    }


def input_ids(folder: Path) -> pl.Series:
    """Id of every input row that was read, nulls and repeated ids included."""
    parts = [pl.read_parquet(folder / name, columns=[TICKET_ID], glob=False) for name in (TICKETS_FILE, UNREAD_FILE)]
    return pl.concat(parts)[TICKET_ID]


def quarantined_ids(path: Path, id_column: str) -> pl.Series:
    """Id of every row of a quarantine, by the id column's name in the input."""
    scan = pl.scan_parquet(path, glob=False)
    name = name_in_quarantine(id_column, list(scan.collect_schema()))
    return scan.select(pl.selectors.by_name(name).alias(TICKET_ID)).collect().to_series()


def prediction_table(path: Path, id_column: str) -> pl.DataFrame:
    """What the output contract judges of each prediction.

    Returns:
        ``ticket_id``, ``label``, ``probability``, ``margin``; ``probability_sum``, the sum of the exponentials of
        the log-probabilities; and ``fits_scores``: whether label, probability and margin follow from them
        (``yes``, or the name of the first that does not; null where one of them is broken in itself).
        Missing and non-finite numbers are -1, a missing label is ``(none)``.
    """
    columns = pl.selectors.by_name(id_column, LABEL, PROBABILITY, MARGIN, LOG_PROBS)
    scan = pl.scan_parquet(path, glob=False).select(columns)
    rows = scan.select(pl.len()).collect().item()
    # A million rows with 77 labels: 290 MB at most; pyarrow's `iter_batches` took 610 in the same time.
    starts = range(0, max(rows, 1), CHUNK_ROWS)
    return pl.concat([_judged(scan.slice(start, CHUNK_ROWS).collect(), id_column) for start in starts])


def _judged(frame: pl.DataFrame, id_column: str) -> pl.DataFrame:
    labels = [field.name for field in frame.schema[LOG_PROBS].fields]
    scores = frame[LOG_PROBS].struct.unnest().to_numpy().astype(np.float64).reshape(len(frame), len(labels))
    numbers = [pl.col(name).fill_null(NOT_A_NUMBER).fill_nan(NOT_A_NUMBER) for name in (PROBABILITY, MARGIN)]
    judged = frame.select(pl.selectors.by_name(id_column).alias(TICKET_ID), pl.col(LABEL).fill_null(NO_LABEL), *numbers)
    finite = np.isfinite(scores).all(axis=1)
    probabilities = np.exp(np.where(finite[:, None], scores, -np.log(len(labels))))
    total = probabilities.sum(axis=1)
    second, first = np.sort(probabilities, axis=1)[:, -2:].T
    index = judged[LABEL].cast(pl.Enum(labels), strict=False).to_physical().cast(pl.Int64).fill_null(-1).to_numpy()
    probability, margin = judged[PROBABILITY].to_numpy(), judged[MARGIN].to_numpy()
    whole = finite & (index >= 0) & (np.abs(total - 1) <= 1e-3)
    whole &= (probability >= 0) & (probability <= 1 + ROUNDING) & (margin >= 0) & (margin <= 1 + ROUNDING)
    mine = probabilities[np.arange(len(frame)), index]
    wrong = [mine < first, np.abs(probability - first) > ROUNDING, np.abs(margin - (first - second)) > ROUNDING]
    verdicts = pl.Series(FITS_SCORES, ["yes", LABEL, PROBABILITY, MARGIN, None], dtype=pl.String)
    return judged.with_columns(
        pl.Series(PROBABILITY_SUM, np.where(finite, total, NOT_A_NUMBER)),
        verdicts[np.select([~whole, *wrong], [4, 1, 2, 3], 0)],
    )


def outcome_table(
    expected: pl.Series, predictions: pl.DataFrame, quarantined: pl.Series, *, rows: int | None = None
) -> pl.DataFrame:
    """One row an outcome, and one for each input row without: predictions first, then quarantine, then lost rows.

    ``outcome`` is ``predicted`` or ``quarantined``; ``doubled`` for an outcome more than the input has rows of
    that id, and for a second prediction of an id; ``not in the input``; or ``lost``. So a complete run has as many
    rows as its input.

    Args:
        expected: Id of every input row that was read.
        predictions: From `prediction_table`.
        quarantined: Id of every row in quarantine.
        rows: Rows of the input by its own count; those that were not even read are lost ones without an id.
    """
    if rows is not None and rows > len(expected):
        expected = expected.extend_constant(None, rows - len(expected))
    wanted, predicted, put_aside = _codes(expected, predictions[TICKET_ID], quarantined)
    size = 1 + max(int(codes.max(initial=-1)) for codes in (wanted, predicted, put_aside))
    due, had = np.bincount(wanted, minlength=size), np.bincount(predicted, minlength=size)
    nth = np.minimum(had, 1)[put_aside] + _occurrence(put_aside) + 1
    first = _occurrence(predicted) == 0
    names = pl.Series(OUTCOME, [PREDICTED, QUARANTINED, DOUBLED, STRANGE])
    outcome = names[np.select([due[predicted] == 0, ~first], [3, 2], 0)]
    outcome_aside = names[np.select([due[put_aside] == 0, nth > due[put_aside]], [3, 2], 1)]
    missing = due - had - np.bincount(put_aside, minlength=size)
    lost = expected.filter(pl.Series(_occurrence(wanted) < missing[wanted])).alias(TICKET_ID)
    return pl.concat(
        [
            predictions.with_columns(outcome),
            quarantined.alias(TICKET_ID).to_frame().with_columns(outcome_aside),
            lost.to_frame().with_columns(pl.lit(LOST).alias(OUTCOME)),
        ],
        how="diagonal",
    )


def _codes(*ids: pl.Series) -> list[np.ndarray]:
    """Equal ids, null among them, as equal small numbers, int32."""
    # For a million ids this and what follows take 0.9 s and 170 MB; group-bys and a window took 4 s and 430 MB.
    joined = pl.concat([part.alias(TICKET_ID) for part in ids]).rechunk().to_arrow()
    codes = joined.dictionary_encode(null_encoding="encode").indices.to_numpy()
    return np.split(codes, np.cumsum([len(part) for part in ids])[:-1])


def _occurrence(codes: np.ndarray) -> np.ndarray:
    """How often each value stood before in the array."""
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(codes) else np.zeros(0, dtype=np.int64)
    lengths = np.diff(np.r_[starts, len(codes)])
    result = np.empty(len(codes), dtype=np.int64)
    result[order] = np.arange(len(codes)) - np.repeat(starts, lengths)
    return result


def largest_share(counts: dict[str, int]) -> float | None:
    """Share of the most frequent label; None without predictions."""
    total = sum(counts.values())
    return max(counts.values()) / total if total else None
