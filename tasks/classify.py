"""Classify: one mapped task run a bucket."""

from pathlib import Path

from prefect import State, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run
from prefect.states import Completed

from tasks.progress import follow
from tasks.retries import DELAYS, RETRIES, is_transient
from tasks.runners import make_runner
from tasks.timing import stage_seconds
from ticket_engine.bucket_files import Bucket, BucketPlan
from ticket_engine.settings import RunSettings


def bucket_name() -> str:
    """Name of a mapped task run: bucket and length range."""
    bucket: Bucket = task_run.parameters["bucket"]
    return f"bucket {bucket.index:03d}: {bucket.tickets} tickets of {bucket.shortest} to {bucket.longest} tokens"


@task(
    name="classify-bucket",
    task_run_name=bucket_name,
    cache_policy=NO_CACHE,
    retries=RETRIES,
    retry_delay_seconds=DELAYS,
    retry_condition_fn=is_transient,
)
def classify_bucket(bucket: Bucket, folder: Path, store: Path) -> State:
    """Score a bucket; shows as Cached if its part was there."""
    from ticket_engine import bucket_scoring

    result = bucket_scoring.classify_bucket(bucket, folder, store)
    message = f"{result.tickets} tickets in {result.seconds:.1f} s, {result.failed} without scores"
    get_run_logger().info("Bucket %d: %s", bucket.index, message)
    return Completed(name="Cached" if result.reused else "Completed", message=message, data=result)


@task(name="load-model", task_run_name="load-model", cache_policy=NO_CACHE)
def load_model(folder: Path) -> None:
    """Load the weights once and compare the fast scores with the reference on a few tickets."""
    from ticket_engine.engine import load_engine

    with stage_seconds(folder, "load"):
        load_engine(folder)


def classify_buckets(settings: RunSettings, plan: BucketPlan, folder: Path, store: Path, workers: int) -> None:
    """Map `classify_bucket` over the plan and follow the runs until all are done."""
    if not plan.buckets:
        return
    if settings.runner == "threads":
        load_model(folder)
    with stage_seconds(folder, "classify"), make_runner(settings, workers) as runner:
        jobs = [{"bucket": bucket, "folder": folder, "store": store} for bucket in plan.buckets]
        follow([runner.submit(classify_bucket, parameters) for parameters in jobs], plan)
