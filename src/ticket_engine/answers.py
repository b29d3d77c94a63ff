"""A run's answers beside the gold labels: read, joined by id, checked."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import polars as pl

from ticket_engine.errors import HeadError, InputError, OutputError, SettingsError
from ticket_engine.evaluation import Comparison, Evaluation, Share
from ticket_engine.fitted_texts import hash_texts
from ticket_engine.head_files import load_head
from ticket_engine.ownership import EVALUATION, check_ours, mark
from ticket_engine.publish import read_manifest
from ticket_engine.schemas import LABEL, LOG_PROBS, MANIFEST_FILE, PREDICTIONS_FILE, PROBABILITY
from ticket_engine.sources import open_table

EVALUATION_FILE: Final = "evaluation.json"
PAGE_FILE: Final = "index.html"
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Answers:
    """Tickets that have both labels.

    Attributes:
        joined: ``id`` (String), ``gold``, ``label``, ``probability``, ``text`` (null where the gold table
            has none) and, where asked for, ``group``; in the gold table's order.
        labels: Those that the run knows in its order, then gold labels that it does not know.
        missing: Gold rows without a prediction.
    """

    joined: pl.DataFrame
    labels: tuple[str, ...]
    missing: int


def read_answers(
    predictions: str,
    gold: str,
    *,
    id_column: str,
    gold_column: str,
    text_columns: tuple[str, ...] = (),
    group: tuple[str | None, str | None] = (None, None),
) -> Answers:
    """Predictions joined with gold labels.

    Args:
        predictions: A published folder, or its ``predictions.parquet``.
        gold: See `sources.open_table`; rows without a gold label are left out.
        id_column: Of both.
        gold_column: Of the gold table.
        text_columns: Joined to ``text`` where the gold table has them.
        group: Column, and regular expression that cuts the group out of it.

    Raises:
        InputError: A table or column is missing, ids repeat, or no id is in both.
        SettingsError: The pattern is no regular expression with one bracket.
    """
    given, known = _read_predictions(predictions, id_column)
    truth = _read_gold(gold, id_column, gold_column, text_columns, group)
    joined = truth.join(given, on="id", how="inner", validate="1:1", maintain_order="left")
    if not len(joined):
        raise InputError(
            f"None of the {len(truth)} gold ids is among the {len(given)} predictions. "
            "Check --id-column, and that both are of the same tickets."
        )
    extra = sorted(set(joined["gold"].unique()) - set(known))
    return Answers(joined, (*known, *extra), len(truth) - len(joined))


def count_fitted(predictions: str, answers: Answers) -> int | None:
    """How many of these tickets the run's head was fitted on; None where that cannot be told.

    Args:
        predictions: A published folder with its manifest.
        answers: With the tickets' texts.
    """
    folder = Path(predictions)
    if not (folder / MANIFEST_FILE).is_file() or answers.joined["text"].null_count():
        return None
    used = read_manifest(folder).get("head")
    if not used:
        return 0
    try:
        head = load_head(used["folder"], used["sha256"])
    except HeadError:
        return None
    return int(np.isin(hash_texts(answers.joined["text"].to_list()), head.fitted_texts).sum())


def right_on(answers: Answers, other: Answers) -> tuple[np.ndarray, np.ndarray]:
    """Whether each of two runs was right on the tickets that both answered, bool, same order.

    Raises:
        InputError: They share no ticket.
    """
    theirs = other.joined.select("id", pl.col("label").alias("other"))
    both = answers.joined.join(theirs, on="id", how="inner", validate="1:1", maintain_order="left")
    if not len(both):
        raise InputError("The two runs have no ticket in common. Give two runs over the same table.")
    return (both["label"] == both["gold"]).to_numpy(), (both["other"] == both["gold"]).to_numpy()


def write_evaluation(
    output: Path,
    evaluation: Evaluation,
    comparisons: dict[str, tuple[Share, Comparison]],
    files: dict[str, bytes],
) -> None:
    """Write ``evaluation.json`` and the page with its pictures.

    Raises:
        OutputError: The folder holds something else, or cannot be written.
    """
    output = output.resolve() if output.is_dir() else output
    check_ours(output, EVALUATION)
    compared = {name: {"accuracy": asdict(a), "comparison": asdict(c)} for name, (a, c) in comparisons.items()}
    content = json.dumps({**asdict(evaluation), "compared": compared}, indent=2, ensure_ascii=False)
    try:
        output.mkdir(parents=True, exist_ok=True)
        mark(output, EVALUATION)
        for name, data in {**files, EVALUATION_FILE: (content + "\n").encode()}.items():
            (output / name).write_bytes(data)
    except OSError as error:
        raise OutputError(f"{output} cannot be written: {error.strerror}.") from error


def _read_predictions(source: str, id_column: str) -> tuple[pl.DataFrame, tuple[str, ...]]:
    path = Path(source)
    table = open_table(str(path / PREDICTIONS_FILE) if (path / PREDICTIONS_FILE).is_file() else source)
    needed = (id_column, LABEL, PROBABILITY, LOG_PROBS)
    missing = [column for column in needed if column not in table.schema]
    if missing:
        raise InputError(
            f"{source} has no column {missing[0]!r}: not the predictions of a run, or of another id column."
        )
    labels = tuple(field.name for field in table.schema[LOG_PROBS].fields)
    frame = table.read([id_column, LABEL, PROBABILITY])
    frame = frame.select(
        pl.selectors.by_name(id_column).cast(pl.String).alias("id"), pl.col(LABEL), pl.col(PROBABILITY)
    )
    _check_unique(frame, source)
    return frame, labels


def _read_gold(source, id_column, gold_column, text_columns, group) -> pl.DataFrame:
    table = open_table(source)
    group_column, pattern = group
    for column in (id_column, gold_column, *([group_column] if group_column else [])):
        if column not in table.schema:
            raise InputError(
                f"{source} has no column {column!r}. Choose with --id-column, --gold-column, --group-column."
            )
    texts = [column for column in text_columns if column in table.schema]
    columns = dict.fromkeys([id_column, gold_column, *texts, *([group_column] if group_column else [])])
    frame = table.read(list(columns)).with_row_index("row")
    joined_text = pl.concat_str(
        [pl.selectors.by_name(c).cast(pl.String) for c in texts], separator="\n", ignore_nulls=True
    )
    wanted = [
        pl.selectors.by_name(id_column).cast(pl.String).alias("id"),
        pl.selectors.by_name(gold_column).cast(pl.String).str.strip_chars().alias("gold"),
        (joined_text if texts else pl.lit(None, dtype=pl.String)).alias("text"),
    ]
    if group_column:
        wanted.append(_group_expression(group_column, pattern))
    made = frame.select(wanted).filter(pl.col("gold").is_not_null() & (pl.col("gold") != ""))
    if not len(made):
        raise InputError(f"The column {gold_column!r} of {source} holds no label.")
    _check_unique(made, source)
    return made


def _group_expression(column: str, pattern: str | None) -> pl.Expr:
    values = pl.selectors.by_name(column).cast(pl.String)
    if pattern is None:
        return values.alias("group")
    try:
        brackets = re.compile(pattern).groups
    except re.error as error:
        raise SettingsError(f"--group-pattern is no regular expression: {error}.") from None
    if brackets != 1:
        raise SettingsError(f"--group-pattern has {brackets} brackets. Allowed: one, around the group.")
    return values.str.extract(pattern, 1).alias("group")


def _check_unique(frame: pl.DataFrame, source: str) -> None:
    repeated = frame.filter(pl.col("id").is_duplicated())["id"].unique().sort()
    if len(repeated):
        shown = ", ".join(str(value)[:40] for value in repeated[:_SHOWN])
        raise InputError(f"{len(repeated)} ids of {source} are repeated: {shown}. Each ticket may have one label.")
