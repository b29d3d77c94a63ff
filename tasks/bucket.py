"""Bucket: what is known already, and batches and buckets of the rest."""

from pathlib import Path

from prefect import State, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed

from tasks.retries import DELAYS, RETRIES, is_transient
from tasks.timing import stage_seconds
from ticket_engine.bucket_files import BucketPlan
from ticket_engine.settings import RunSettings


@task(
    name="find-scored",
    task_run_name="find-scored",
    cache_policy=NO_CACHE,
    retries=RETRIES,
    retry_delay_seconds=DELAYS,
    retry_condition_fn=is_transient,
)
def find_scored(folder: Path, store: Path) -> State:
    """Tickets that an earlier run scored; the task shows as Cached if there are any."""
    from ticket_engine import stages

    with stage_seconds(folder, "find_scored"):
        summary = stages.find_scored(folder, store)
    message = f"{summary.tickets} different tickets were scored before"
    if summary.rejected_parts:
        message += f"; {summary.rejected_parts} damaged parts are done again"
    get_run_logger().info(message)
    return Completed(name="Cached" if summary.tickets else "Completed", message=message, data=summary)


def decide_by_text(settings: RunSettings, folder: Path) -> None:
    """Tickets that the head's text stage decides; they need no model. Nothing to do without a head."""
    if settings.head is not None:
        run_text_stage(folder)


@task(name="decide-by-text", task_run_name="decide-by-text", cache_policy=NO_CACHE)
def run_text_stage(folder: Path) -> int:
    """Scores of the tickets that their text alone decides; how many different ones."""
    from ticket_engine import stages

    with stage_seconds(folder, "decide_by_text"):
        decided = stages.decide_by_text(folder)
    get_run_logger().info("%d different tickets are decided by their text alone", decided)
    return decided


@task(name="bucket", task_run_name="bucket", cache_policy=NO_CACHE)
def bucket(settings: RunSettings, folder: Path) -> BucketPlan:
    """Buckets of the tickets that still need scores, one file each in ``folder/buckets``."""
    from ticket_engine import stages

    with stage_seconds(folder, "bucket"):
        plan = stages.plan(folder, batch_size=settings.batch_size, max_buckets=settings.max_buckets)
    get_run_logger().info(
        "%d tickets (%d different, %d known, %d by text) in %d batches and %d buckets, padding overhead %.1f %%",
        plan.tickets,
        plan.distinct,
        plan.stored,
        plan.by_text,
        plan.batches,
        len(plan.buckets),
        100 * plan.padding_overhead,
    )
    return plan
