"""Prepare: the model's files, the prompt, and how the machine is used. Loads no weights."""

from pathlib import Path

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from tasks.retries import DELAYS, RETRIES, is_transient
from tasks.timing import stage_seconds
from ticket_engine.settings import RunSettings


@task(
    name="prepare-model",
    task_run_name="prepare-model",
    cache_policy=NO_CACHE,
    retries=RETRIES,
    retry_delay_seconds=DELAYS,
    retry_condition_fn=is_transient,
)
def prepare(settings: RunSettings, folder: Path) -> int:
    """Write the engine's spec to the folder; the number of passes to run at once."""
    from ticket_engine.preparation import prepare_engine

    with stage_seconds(folder, "prepare"):
        spec = prepare_engine(settings, folder)
    get_run_logger().info(
        "Model %s (%s): %s, %s, %d thread(s) x %d worker(s), shared prefix of %d tokens",
        spec.model,
        spec.model_hash[:12],
        spec.execution,
        spec.dtype,
        spec.threads,
        spec.workers,
        len(spec.prompt.prefix_ids),
    )
    return spec.workers
