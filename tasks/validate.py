"""Validate: gather, spot check by the reference, and the output contract. Nothing is published here."""

from pathlib import Path

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from data_contracts.checks import check_predictions, check_tickets
from data_contracts.reports import ContractReport
from tasks.retries import DELAYS, RETRIES, is_transient
from tasks.timing import stage_seconds
from ticket_engine.reading import ReadSummary
from ticket_engine.results import GatherSummary
from ticket_engine.review import ReviewRule
from ticket_engine.settings import RunSettings
from ticket_engine.spot_check import SpotCheck


@task(name="check-tickets", task_run_name="check-tickets", cache_policy=NO_CACHE)
def check_input(settings: RunSettings, folder: Path, summary: ReadSummary) -> ContractReport:
    """The input contract, before any weights are loaded."""
    with stage_seconds(folder, "check_tickets"):
        report = check_tickets(folder, settings, summary)
    get_run_logger().info("Input contract: %s", report.one_line())
    return report


@task(
    name="gather",
    task_run_name="gather",
    cache_policy=NO_CACHE,
    retries=RETRIES,
    retry_delay_seconds=DELAYS,
    retry_condition_fn=is_transient,
)
def gather(settings: RunSettings, folder: Path, store: Path) -> GatherSummary:
    """All scores joined to the tickets, in input order; late rejections go to quarantine."""
    from ticket_engine import stages

    with stage_seconds(folder, "gather"):
        rule = ReviewRule(settings.review_precision, settings.review_budget)
        return stages.gather(folder, store, settings.input, rule)


@task(name="spot-check", task_run_name="spot-check", cache_policy=NO_CACHE)
def spot_check(settings: RunSettings, folder: Path) -> SpotCheck:
    """Sampled tickets scored again, one at a time, by the reference."""
    from ticket_engine import stages

    with stage_seconds(folder, "spot_check"):
        result = stages.spot_check(folder, settings.spot_check, settings.seed)
    get_run_logger().info("Spot check: %s", result.one_line())
    return result


@task(name="check-predictions", task_run_name="check-predictions", cache_policy=NO_CACHE)
def check_output(
    settings: RunSettings, folder: Path, checked: SpotCheck, incoming: ContractReport, rows: int
) -> ContractReport:
    """The output contract over all predictions and the spot check."""
    with stage_seconds(folder, "check_predictions"):
        report = check_predictions(folder, settings, checked, incoming, rows)
    get_run_logger().info("Output contract: %s", report.one_line())
    return report
