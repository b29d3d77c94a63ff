"""Names of flow runs: the run's date, and once it is known the number of rows."""

from datetime import date

from prefect.client.orchestration import get_client
from prefect.runtime import flow_run

from ticket_engine.reading import ReadSummary
from ticket_engine.settings import RunSettings


def scheduled_day() -> date:
    """The day, in this machine's time zone, for which the flow run was scheduled; today outside of a run."""
    moment = flow_run.scheduled_start_time
    return moment.astimezone().date() if moment else date.today()


def start_name() -> str:
    """Name of a flow run before its table is read."""
    settings = flow_run.parameters["settings"]
    given = settings.get("run_date") if isinstance(settings, dict) else settings.run_date
    return f"classify {given or scheduled_day().isoformat()}"


def name_run(settings: RunSettings, rows: ReadSummary) -> None:
    """Put the run's date and its rows into its name."""
    with get_client(sync_client=True) as client:
        client.update_flow_run(flow_run.id, name=f"classify {settings.run_date}: {rows.rows} rows")
