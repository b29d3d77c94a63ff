"""Read: the input table becomes tickets and quarantine."""

from pathlib import Path

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from tasks.retries import DELAYS, RETRIES, is_transient
from tasks.timing import stage_seconds
from ticket_engine.reading import ReadSummary, read_tickets
from ticket_engine.settings import RunSettings


@task(
    name="read",
    task_run_name="read",
    cache_policy=NO_CACHE,
    retries=RETRIES,
    retry_delay_seconds=DELAYS,
    retry_condition_fn=is_transient,
)
def read(settings: RunSettings, folder: Path) -> ReadSummary:
    """Tickets of the input in ``folder/tickets.parquet``, rows without outcome in ``quarantine.parquet``."""
    with stage_seconds(folder, "read"):
        summary = read_tickets(
            settings.input,
            folder,
            id_column=settings.id_column,
            text_columns=settings.text_columns,
            limit=settings.limit,
        )
    get_run_logger().info(
        "%d rows: %d tickets, %d in quarantine %s", summary.rows, summary.tickets, summary.quarantined, summary.reasons
    )
    return summary
