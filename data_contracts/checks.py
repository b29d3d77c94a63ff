"""The two contracts of a run: what came in, and what is about to be published."""

from pathlib import Path

import pandas as pd
import polars as pl
from ticket_engine.reading import ReadSummary

from data_contracts.pages import write_index
from data_contracts.reports import ContractReport
from data_contracts.suites import read_suite, run_suite, thresholds
from ticket_engine.publish import read_manifest
from ticket_engine.schemas import (
    INPUT_INDEX,
    IS_TRUNCATED,
    LABEL,
    LOG_PROBS,
    MANIFEST_FILE,
    MARGIN,
    PREDICTIONS_FILE,
    PROBABILITY,
    QUARANTINE_FILE,
    TEXT,
    TOKEN_LENGTH,
)
from ticket_engine.settings import RunSettings
from ticket_engine.spot_check import SpotCheck


def check_tickets(folder: Path, settings: RunSettings, summary: ReadSummary) -> ContractReport:
    """The input contract over the tickets that were read and tokenized.

    Raises:
        SettingsError: A suite is not usable, or an override names no threshold.
    """
    suite, other = read_suite(settings.tickets_contract), read_suite(settings.predictions_contract)
    limits = thresholds([suite, other], settings.contract_parameters)
    id_column = settings.id_column
    tickets = pl.scan_parquet(folder / "tickets.parquet").select(
        pl.col(id_column).alias("ticket_id"), INPUT_INDEX, pl.col(TEXT).str.len_chars().alias("characters")
    )
    tokens = pl.scan_parquet(folder / "tokens.parquet").select(INPUT_INDEX, TOKEN_LENGTH, IS_TRUNCATED)
    table = tickets.join(tokens, on=INPUT_INDEX, how="left").collect()
    figures = {
        "rows": summary.rows,
        "quarantine_rate": summary.quarantined / summary.rows if summary.rows else None,
        "truncated_rate": table[IS_TRUNCATED].mean(),
        "median_characters": table["characters"].median(),
    }
    frame = _pandas(table.select("ticket_id", "characters", TOKEN_LENGTH))
    report = run_suite(suite, frame, limits | figures, "ticket_id", folder)
    write_index(folder, [report])
    return report


def check_predictions(
    folder: Path, settings: RunSettings, checked: SpotCheck, incoming: ContractReport | None = None
) -> ContractReport:
    """The output contract over predictions, quarantine and spot check of a run."""
    suite, other = read_suite(settings.predictions_contract), read_suite(settings.tickets_contract)
    limits = thresholds([suite, other], settings.contract_parameters)
    labels = tuple(
        field.name for field in pl.scan_parquet(folder / PREDICTIONS_FILE).collect_schema()[LOG_PROBS].fields
    )
    table = outcome_table(folder, settings.id_column)
    counts = table.filter(pl.col(LABEL).is_not_null())[LABEL].value_counts()
    figures = {
        "labels": list(labels),
        "agreement": checked.agreement if checked.sampled else None,
        "min_agreement": settings.min_agreement,
        "label_share": _largest_share(counts, limits["min_rows_for_shares"]),
        "label_drift": _drift(counts, Path(settings.output), limits["min_rows_for_shares"]),
    }
    if settings.on_drift == "fail":
        suite = suite | {"expectations": [_strict(entry) for entry in suite["expectations"]]}
    report = run_suite(suite, _pandas(table), limits | figures, "ticket_id", folder)
    write_index(folder, [item for item in (incoming, report) if item is not None])
    return report


def check_published(output: Path, manifest: dict) -> list[str]:
    """What of the output contract a published folder breaks, a line each; the spot check is not repeated."""
    settings = manifest["settings"]
    predictions = pl.read_parquet(output / PREDICTIONS_FILE)
    quarantine = pl.scan_parquet(output / QUARANTINE_FILE).select(pl.len()).collect().item()
    figures = prediction_figures(predictions, settings["id_column"])
    problems = []
    if len(predictions) + quarantine != manifest["rows"]["input"]:
        problems.append(f"{len(predictions)} predictions and {quarantine} in quarantine do not cover the input's rows")
    if predictions[settings["id_column"]].n_unique() != len(predictions):
        problems.append("a ticket has more than one prediction")
    unknown = set(predictions[LABEL].unique()) - set(manifest["labels"])
    if unknown:
        problems.append(f"labels outside the set: {', '.join(map(str, sorted(unknown, key=str)[:3]))}")
    off = figures.filter(((pl.col("probability_sum") - 1).abs() > 1e-3) | ~pl.col("scores_agree"))
    if len(off):
        problems.append(f"{len(off)} tickets whose probabilities do not sum to 1 or do not fit their label")
    return problems


def prediction_figures(predictions: pl.DataFrame, id_column: str) -> pl.DataFrame:
    """One row a prediction: id, label, probability, margin, probability sum, and whether the label fits the scores.

    Scores that are not finite give a probability sum of -1.
    """
    labels = [field.name for field in predictions.schema[LOG_PROBS].fields]
    scores = predictions[LOG_PROBS].struct.unnest()
    total = sum((scores[label].cast(pl.Float64).exp() for label in labels), pl.Series([0.0] * len(scores)))
    best = pl.max_horizontal(labels)
    likeliest = scores.select(best.alias("best"), *[pl.col(label).alias(f"s{i}") for i, label in enumerate(labels)])
    mine = pl.Series([None] * len(scores), dtype=pl.Float32)
    for index, label in enumerate(labels):
        mine = likeliest[f"s{index}"].zip_with(predictions[LABEL] == label, mine)
    finite = scores.select(pl.all_horizontal(pl.all().is_finite().fill_null(False))).to_series()
    return predictions.select(pl.col(id_column).alias("ticket_id"), LABEL, PROBABILITY, MARGIN).with_columns(
        pl.Series("probability_sum", total).fill_null(-1.0).zip_with(finite, pl.Series([-1.0])),
        (mine >= likeliest["best"]).fill_null(False).alias("scores_agree"),
        pl.col(PROBABILITY).fill_nan(-1.0),
        pl.col(MARGIN).fill_nan(-1.0),
    )


def outcome_table(folder: Path, id_column: str) -> pl.DataFrame:
    """One row a ticket of the input or an outcome without one: its figures and its number of ``outcomes``.

    Input rows that never became tickets are in quarantine by their position and counted there.
    """
    tickets = pl.read_parquet(folder / "tickets.parquet", columns=[id_column, INPUT_INDEX])
    failed = pl.read_parquet(folder / "failed.parquet", columns=[INPUT_INDEX])
    predictions = prediction_figures(pl.read_parquet(folder / PREDICTIONS_FILE), id_column)
    expected = tickets.select(
        pl.col(id_column).alias("ticket_id"), pl.col(INPUT_INDEX).is_in(failed[INPUT_INDEX].implode()).alias("late")
    )
    counts = predictions.group_by("ticket_id").len("predicted")
    outcomes = (
        expected.join(counts, on="ticket_id", how="full", coalesce=True)
        .with_columns(
            pl.col("predicted").fill_null(0),
            expected=pl.col("late").is_not_null(),
            late=pl.col("late").fill_null(False),
        )
        .select(
            "ticket_id",
            outcomes=pl.when("expected")
            .then(pl.col("predicted") + pl.col("late").cast(pl.UInt32))
            .otherwise(pl.lit(2))
            .cast(pl.Int32),
        )
    )
    return outcomes.join(predictions.unique("ticket_id", keep="first"), on="ticket_id", how="left")


def _largest_share(counts: pl.DataFrame, min_rows: float) -> float | None:
    total = counts["count"].sum()
    return counts["count"].max() / total if total and total >= min_rows else None


def _drift(counts: pl.DataFrame, output: Path, min_rows: float) -> float | None:
    """Total variation between this run's label shares and the last published run's; None without one."""
    if not (output / MANIFEST_FILE).is_file():
        return None
    before = read_manifest(output)["labels"]
    now = dict(counts.iter_rows())
    total, total_before = sum(now.values()), sum(before.values())
    if min(total, total_before) < max(1, min_rows):
        return None
    labels = set(now) | set(before)
    return sum(abs(now.get(label, 0) / total - before.get(label, 0) / total_before) for label in labels) / 2


def _strict(entry: dict) -> dict:
    return entry | {"severity": "critical"} if entry.get("meta", {}).get("title") == "label drift" else entry


def _pandas(table: pl.DataFrame) -> pd.DataFrame:
    """An Arrow-backed copy, no values converted to Python objects."""
    return table.to_pandas(use_pyarrow_extension_array=True)
