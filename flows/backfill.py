"""A range of past days: one run of the backfill deployment a day, queued one after the other.

python -m flows.backfill --from 2026-11-01 --to 2026-11-30
"""

from datetime import date, datetime, timedelta
from typing import Annotated

import typer
from prefect.deployments import run_deployment

DEPLOYMENT = "classify-tickets/backfill"


def days(first: date, last: date) -> list[date]:
    """Every day from first to last, both included.

    Raises:
        BadParameter: The range is empty or backwards.
    """
    if last < first:
        raise typer.BadParameter(f"--to {last} lies before --from {first}.")
    return [first + timedelta(days=number) for number in range((last - first).days + 1)]


def main(
    first: Annotated[datetime, typer.Option("--from", formats=["%Y-%m-%d"])],
    last: Annotated[datetime, typer.Option("--to", formats=["%Y-%m-%d"])],
) -> None:
    """Queue one run a day; the deployment's concurrency limit does them in turn."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        settings = client.read_deployment_by_name(DEPLOYMENT).parameters["settings"]
    for day in days(first.date(), last.date()):
        run = run_deployment(DEPLOYMENT, parameters={"settings": settings | {"run_date": day.isoformat()}}, timeout=0)
        print(f"{day}: {run.name}")


if __name__ == "__main__":
    typer.run(main)
