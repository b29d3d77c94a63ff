"""Where the mapped tasks run: threads of this process, or a Dask or Ray cluster."""

from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from ticket_engine.errors import SettingsError
from ticket_engine.settings import RunSettings


def make_runner(settings: RunSettings, workers: int) -> TaskRunner:
    """The task runner of a run.

    Args:
        settings: Its runner and, for a cluster that runs already, its address.
        workers: Buckets at once. A local Dask or Ray cluster gets so many processes of one thread each.

    Raises:
        SettingsError: The runner's package is not installed.
    """
    if settings.runner == "threads":
        return ThreadPoolTaskRunner(max_workers=workers)
    try:
        if settings.runner == "dask":
            from prefect_dask import DaskTaskRunner

            if settings.runner_address:
                return DaskTaskRunner(address=settings.runner_address)
            cluster = {"n_workers": workers, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
            return DaskTaskRunner(cluster_kwargs=cluster)
        from prefect_ray import RayTaskRunner

        return RayTaskRunner(address=settings.runner_address, init_kwargs={"include_dashboard": False})
    except ImportError:
        raise SettingsError(
            f"Runner {settings.runner} is not installed. Install it with: pip install 'prefect-{settings.runner}'."
        ) from None
