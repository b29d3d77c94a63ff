"""Names of flow runs: the run's date, and once it is known the number of rows."""

from datetime import date, datetime, tzinfo
from zoneinfo import ZoneInfo

from prefect.client.orchestration import get_client
from prefect.runtime import flow_run

from ticket_engine.reading import ReadSummary
from ticket_engine.settings import RunSettings


def scheduled_day(zone: tzinfo | None) -> date:
    """The day in a time zone (None: this machine's) for which the flow run was scheduled; today outside of a run."""
    moment = flow_run.scheduled_start_time
    return (moment.astimezone(zone) if moment else datetime.now(zone)).date()


def start_name() -> str:
    """Name of a flow run before its table is read."""
    settings = flow_run.parameters["settings"]
    given = settings if isinstance(settings, dict) else settings.model_dump()
    zone = given.get("time_zone")
    return f"classify {given.get('run_date') or scheduled_day(ZoneInfo(zone) if zone else None).isoformat()}"


def name_run(settings: RunSettings, rows: ReadSummary) -> None:
    """Put the run's date and its rows into its name."""
    with get_client(sync_client=True) as client:
        client.update_flow_run(flow_run.id, name=f"classify {settings.run_date}: {rows.rows} rows")
