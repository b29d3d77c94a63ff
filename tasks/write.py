"""Write: refuse, or put the run's files together and publish them in one step."""

import shutil
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event

from data_contracts.reports import DOCS_FOLDER, ContractReport
from tasks.pictures import PICTURE, draw_labels
from tasks.timing import read_seconds, stage_seconds
from ticket_engine.errors import RefusedError, StoreError
from ticket_engine.publish import keep_refused, publish, write_manifest
from ticket_engine.schemas import PREDICTIONS_FILE, QUARANTINE_FILE, REVIEW_FILE
from ticket_engine.settings import RunSettings


def refuse_unless(report: ContractReport, folder: Path, output: Path) -> None:
    """Keep the staged files and end the run if a contract does not hold.

    Raises:
        RefusedError: Says which expectations failed and where the files are.
    """
    if report.passed:
        return
    staged = _stage(folder)
    kept = keep_refused(staged, output)
    _tell("refused", output, {"failed": [item.name for item in report.failed]})
    raise RefusedError(f"Not published, stage {report.stage}: {report.one_line()}. Files and pages are kept in {kept}.")


@task(name="write", task_run_name="write", cache_policy=NO_CACHE)
def write(settings: RunSettings, folder: Path, results: tuple) -> dict:
    """Publish the run's files and its manifest, and clean the store; the manifest."""
    from ticket_engine.manifest import make_manifest

    with stage_seconds(folder, "write"):
        staged = _stage(folder)
        draw_labels(results[3].label_counts, staged / PICTURE)
    manifest = make_manifest(settings, folder, [_plain(result) for result in results], read_seconds(folder))
    manifest = {"created": datetime.now(UTC).isoformat(timespec="seconds")} | manifest
    output = Path(settings.output)
    manifest = write_manifest(staged, manifest)
    publish(staged, output)
    _keep_scores(settings, folder)
    _tell("published", output, {"rows": manifest["rows"], "agreement": manifest["spot_check"]["agreement"]})
    get_run_logger().info("Published to %s", output)
    return manifest


def _keep_scores(settings: RunSettings, folder: Path) -> None:
    """Scores for the next run; what goes wrong here costs that run some work, and this one is published."""
    from ticket_engine import stages

    try:
        removed = stages.keep_scores(folder, Path(settings.store), settings.store_days)
    except (OSError, StoreError) as error:
        get_run_logger().warning("The store of scores was not tidied: %s", error)
        return
    get_run_logger().info("%d old files removed from the store of scores", removed)


def _plain(value: object) -> dict:
    return value.summary() if hasattr(value, "summary") else asdict(value)


def _stage(folder: Path) -> Path:
    """The files to publish, or to keep when refused, in a folder of their own."""
    staged = folder / "staged"
    staged.mkdir()
    for name in (PREDICTIONS_FILE, QUARANTINE_FILE, REVIEW_FILE):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, staged / name)
    if (folder / DOCS_FOLDER).exists():
        shutil.move(folder / DOCS_FOLDER, staged / DOCS_FOLDER)
    return staged


def _tell(what: str, output: Path, payload: dict) -> None:
    resource = {"prefect.resource.id": f"classify-tickets.output.{output.name}", "prefect.resource.name": output.name}
    emit_event(event=f"classify-tickets.{what}", resource=resource, payload=payload | {"output": str(output)})
