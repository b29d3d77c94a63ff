"""Tokenize: token ids and length columns."""

from pathlib import Path

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from tasks.timing import stage_seconds
from ticket_engine.tokenization import TokenizeSummary


@task(name="tokenize", task_run_name="tokenize", cache_policy=NO_CACHE)
def tokenize(folder: Path) -> TokenizeSummary:
    """Tokens of the run's tickets in ``folder/tokens.parquet``."""
    from ticket_engine import stages

    with stage_seconds(folder, "tokenize"):
        summary = stages.tokenize(folder)
    get_run_logger().info(
        "%d tickets of %d to %d tokens (median %g, mean %.1f), %d truncated",
        summary.tickets,
        summary.shortest,
        summary.longest,
        summary.median,
        summary.mean,
        summary.truncated,
    )
    return summary
