"""The two contracts of a run, what came in and what is about to be published, and a published run's again."""

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import polars as pl

from data_contracts.overview import write_overview
from data_contracts.reports import CRITICAL, ContractReport
from data_contracts.suites import PARAMETER, read_suite, read_thresholds, title, with_severity
from data_contracts.tables import (
    CHARACTERS,
    REJECTED_FILE,
    TICKET_ID,
    TICKETS_FILE,
    input_ids,
    largest_share,
    outcome_table,
    prediction_table,
    quarantined_ids,
    ticket_figures,
    ticket_table,
)
from data_contracts.validation import check_suite, run_suite
from ticket_engine.errors import InputError, SettingsError
from ticket_engine.labels import kept_labels
from ticket_engine.publish import find_earlier, read_manifest
from ticket_engine.reading import ReadSummary, quarantine_late
from ticket_engine.schemas import INPUT_INDEX, IS_TRUNCATED, LABEL, PREDICTIONS_FILE, QUARANTINE_FILE, REASON
from ticket_engine.settings import RunSettings
from ticket_engine.spot_check import SpotCheck, bound_without_errors

SUITES_FILE = "suites.json"
DRIFT = "expect_label_shares_to_stay_close"
PREDICTION_FIGURES = (
    "rows",
    "predictions",
    "quarantined",
    "labels",
    "label_counts",
    "label_counts_before",
    "compared_with",
    "largest_label_share",
    "spot_check",
    "min_agreement",
)
SPOT_CHECK_FIELDS = ("per_bucket", "chosen_for")  # long, and in the manifest already


def check_tickets(folder: Path, settings: RunSettings, summary: ReadSummary) -> ContractReport:
    """The input contract over the tickets that were read and tokenized, before any weights are loaded.

    The output contract's suite is read too: what is wrong with it shows now and not after hours of work.

    Args:
        folder: The working folder, with tickets, tokens, quarantine and unread rows.
        settings: The run's settings, resolved.
        summary: Of reading.

    Raises:
        SettingsError: A suite is not usable, or an override names no threshold.
    """
    suite, outgoing = (_read_once(folder, path) for path in (settings.tickets_contract, settings.predictions_contract))
    thresholds = read_thresholds([suite, outgoing], settings.contract_parameters)
    check_suite(outgoing, {*thresholds, *PREDICTION_FIGURES}, thresholds)
    _check_provable(settings.spot_check, summary.tickets, thresholds.get("max_disagreement", 1.0))
    table = ticket_table(folder)
    figures = ticket_figures(table, folder, summary)
    check_suite(suite, {*thresholds, *figures}, thresholds)
    heading = f"What came in: tickets of {settings.run_date}"
    report = run_suite(suite, table, thresholds | figures, folder=folder, heading=heading)
    if not report.passed:
        _put_aside(folder, settings.input, report.broken_rows | _rows_behind_shares(report, suite, table))
    write_overview(folder, str(settings.run_date), [report])
    return report


def _rows_behind_shares(report: ContractReport, suite: dict, table: pl.DataFrame) -> dict[int, str]:
    """Rows that a share is too large of, where it failed: cut tickets, and tickets of the commonest length."""
    share_rows = {
        "truncated_rate": pl.col(IS_TRUNCATED).fill_null(False),
        "same_length_rate": pl.col(CHARACTERS) == pl.col(CHARACTERS).mode().min(),
    }
    failed = {item.name for item in report.failed}
    found: dict[int, str] = {}
    for entry in suite["expectations"]:
        observed = entry.get("kwargs", {}).get("observed")
        rows = share_rows.get(observed.get(PARAMETER)) if isinstance(observed, dict) else None
        if rows is not None and title(entry) in failed:
            found |= dict.fromkeys(table.select(rows.arg_true()).to_series().to_list(), title(entry))
    return found


def _put_aside(folder: Path, source: str, broken: dict[int, str]) -> None:
    """Write the rows that a refused table was refused for to the quarantine, whole, with the expectation's name."""
    places = pl.read_parquet(folder / TICKETS_FILE, columns=[INPUT_INDEX], glob=False)
    if not broken or places.is_duplicated().any():  # a row that was read twice: the refusal says so itself
        return
    reasons = pl.DataFrame({REASON: [f"refused: {name}" for name in broken.values()]}, schema={REASON: pl.String})
    refused = places[list(broken)].hstack(reasons)
    if (folder / REJECTED_FILE).is_file():  # tickets that could not be tokenized
        late = pl.read_parquet(folder / REJECTED_FILE, columns=[INPUT_INDEX, REASON], glob=False)
        refused = pl.concat([late, refused]).unique(INPUT_INDEX, keep="first", maintain_order=True)
    refused.write_parquet(folder / "refused.parquet")
    with suppress(InputError):  # what was read is not what the table holds: the refusal says so itself
        quarantine_late(source, folder, folder / "refused.parquet")


def _read_once(folder: Path, path: str) -> dict:
    """A suite as it was when the run first looked at it: an edit while it runs changes nothing that it is judged by."""
    kept = folder / SUITES_FILE
    suites = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    if path not in suites:
        suites[path] = read_suite(path)
        kept.write_text(json.dumps(suites), encoding="utf-8")
    return suites[path]


def _check_provable(size: int, tickets: int, limit: float) -> None:
    """Refuse a promise about all predictions that a sample of this size cannot show, before it is drawn."""
    best = bound_without_errors(tickets, size)
    if size and best > limit:
        raise SettingsError(
            f"A spot check of {size} tickets proves at best that {best:.0%} of all differ, allowed are {limit:.0%}. "
            f"Raise spot_check, or the contract's max_disagreement, or switch it off with 0."
        )


def check_predictions(
    folder: Path, settings: RunSettings, checked: SpotCheck, incoming: ContractReport, rows: int
) -> ContractReport:
    """The output contract over predictions, quarantine and spot check of a run.

    Args:
        folder: The working folder, with the predictions and the quarantine that are to be published.
        settings: The run's settings, resolved.
        checked: What the spot check found.
        incoming: The input contract's report, for the overview page.
        rows: Rows of the input table by its own count.

    Raises:
        SettingsError: A suite is not usable, or an override names no threshold.
    """
    suites = [_read_once(folder, path) for path in (settings.predictions_contract, settings.tickets_contract)]
    thresholds = read_thresholds(suites, settings.contract_parameters)
    suite = with_severity(suites[0], DRIFT, CRITICAL) if settings.on_drift == "fail" else suites[0]
    predictions = prediction_table(folder / PREDICTIONS_FILE, settings.id_column)
    quarantined = quarantined_ids(folder / QUARANTINE_FILE, settings.id_column)
    figures = _prediction_figures(predictions, kept_labels(folder).names) | {
        "rows": rows,
        "quarantined": len(quarantined),
        **_earlier_run(settings),
        "spot_check": {name: value for name, value in asdict(checked).items() if name not in SPOT_CHECK_FIELDS},
        "min_agreement": settings.min_agreement,
    }
    table = outcome_table(input_ids(folder), predictions, quarantined, rows=rows)
    heading = f"What goes out: labels of {settings.run_date}"
    report = run_suite(suite, table, thresholds | figures, folder=folder, heading=heading)
    write_overview(folder, str(settings.run_date), [incoming, report])
    return report


def check_published(output: Path, manifest: dict) -> list[str]:
    """What of its output contract a published folder breaks, a line each.

    The suite and its thresholds are those that the manifest holds. The spot check is not repeated and the drift
    is against the same earlier run: both were measured when it was published. The input is not read again: every
    id in the folder must have one prediction or be in quarantine, and their sum must be the input's rows.
    """
    recorded = manifest.get("contracts", {}).get("predictions", {})
    if not recorded.get("suite"):
        return ["the manifest holds no output contract"]
    id_column, rows = manifest["settings"]["id_column"], manifest["rows"]["input"]
    predictions = prediction_table(output / PREDICTIONS_FILE, id_column)
    quarantined = quarantined_ids(output / QUARANTINE_FILE, id_column)
    figures = _prediction_figures(predictions, tuple(manifest["labels"])) | {"quarantined": len(quarantined)}
    expected = pl.concat([predictions[TICKET_ID].unique(), quarantined])
    table = outcome_table(expected, predictions, quarantined)
    report = run_suite(recorded["suite"], table, recorded["parameters"] | figures, folder=None)
    problems = [f"{item.name}: {item.expected} Found: {item.observed}." for item in report.failed]
    if len(predictions) + len(quarantined) != rows:
        problems.append(
            f"{len(predictions)} predictions and {len(quarantined)} rows in quarantine of {rows} input rows"
        )
    if manifest["labels"] != figures["label_counts"]:
        problems.append("the manifest counts other labels than the predictions hold")
    return problems


def _prediction_figures(predictions: pl.DataFrame, labels: tuple[str, ...]) -> dict:
    found = dict(predictions.group_by(LABEL).len().iter_rows())
    counts = {label: int(found.get(label, 0)) for label in labels}
    return {
        "predictions": len(predictions),
        "labels": list(labels),
        "label_counts": counts,
        "largest_label_share": largest_share(counts),
    }


def _earlier_run(settings: RunSettings) -> dict:
    """Predictions a label of the run to compare with, and which one that is; None if there is none."""
    folder = find_earlier(settings)
    manifest = read_manifest(folder) if folder else {"labels": None, "run_date": None}
    return {"label_counts_before": manifest["labels"], "compared_with": manifest["run_date"]}
