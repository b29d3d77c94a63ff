"""Progress of the mapped tasks: an artifact in the UI and a bar in the terminal."""

import sys
import time

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.futures import PrefectFuture, as_completed
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ticket_engine.bucket_files import BucketPlan

SECONDS_BETWEEN_UPDATES = 2.0


def follow(futures: list[PrefectFuture], plan: BucketPlan) -> None:
    """Wait for all futures and show how much of the work is done, by tokens.

    Raises:
        Exception: What the first failed task raised, once all have ended.
    """
    total = sum(bucket.real_tokens for bucket in plan.buckets) or 1
    tokens = {future.task_run_id: bucket.real_tokens for future, bucket in zip(futures, plan.buckets, strict=True)}
    artifact = create_progress_artifact(progress=0.0, key="classified", description="Share of the tokens classified")
    done, updated = 0, time.monotonic()
    columns = (
        TextColumn("classifying"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not sys.stderr.isatty(), transient=True) as bar:
        job = bar.add_task("classify", total=total)
        for future in as_completed(futures):
            done += tokens[future.task_run_id]
            bar.update(job, completed=done)
            if time.monotonic() - updated > SECONDS_BETWEEN_UPDATES:
                update_progress_artifact(artifact, progress=100 * done / total)
                updated = time.monotonic()
    update_progress_artifact(artifact, progress=100.0)
    for future in futures:
        future.result()
