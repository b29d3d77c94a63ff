"""The Dask runner: two local worker processes give the predictions that threads give, also if one is killed."""

import importlib.util
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import polars as pl
import psutil
import pytest

Run = Callable[..., tuple[int, str, str]]
HERE_DASK = importlib.util.find_spec("prefect_dask") is not None
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
dask = pytest.mark.skipif(not HERE_DASK, reason="prefect-dask is not installed")


@pytest.fixture
def write_table(tmp_path: Path, sample_tickets: pl.DataFrame) -> Callable[[int], Path]:
    """Writes a table that holds the sample so many times, every text once."""

    def write(times: int) -> Path:
        copies = [sample_tickets.with_columns(pl.col("ticket_id") + f"-{number}") for number in range(times)]
        table = pl.concat(copies).with_columns(body=pl.col("body") + " " + pl.col("ticket_id"))
        table.write_parquet(tmp_path / "tickets.parquet")
        return tmp_path / "tickets.parquet"

    return write


def assert_same(found: Path, expected: Path) -> None:
    """Equal predictions, but for float32 rounding of scores."""
    scores = ["log_probs", "probability", "margin"]
    one, other = (pl.read_parquet(output / "predictions.parquet") for output in (found, expected))
    assert one.drop(scores).equals(other.drop(scores))
    assert (one["probability"] - other["probability"]).abs().max() < 1e-4


@dask
def test_dask_workers_give_the_same_predictions_as_threads(
    run_cli: Run, write_table: Callable[[int], Path], tmp_path: Path
) -> None:
    source = write_table(4)
    for runner in ("threads", "dask"):
        output = tmp_path / runner / "out"
        code, _, errors = run_cli(input=source, output=output, runner=runner, workers=2, batch_size=2)
        assert code == 0, errors
    assert_same(tmp_path / "dask" / "out", tmp_path / "threads" / "out")
    assert json.loads((tmp_path / "dask" / "out" / "manifest.json").read_text())["plan"]["buckets"] > 2


class Killer(threading.Thread):
    """Kills one Dask worker process once some parts are in the store, and notes every part that it sees until the end."""

    def __init__(self, store: Path, parts: int) -> None:
        super().__init__(daemon=True)
        self.store, self.parts = store, parts
        self.kept: set[str] = set()
        self.seen: dict[str, set[tuple[int, int]]] = {}
        self.killed = 0
        self.done = threading.Event()

    def run(self) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not self.done.is_set():
            now = identities(self.store)
            for name, identity in now.items():
                self.seen.setdefault(name, set()).add(identity)
            if not self.killed and len(now) >= self.parts:
                workers = [child for child in psutil.Process().children(recursive=True) if is_dask_worker(child)]
                if workers:
                    os.kill(workers[0].pid, signal.SIGKILL)
                    self.killed = workers[0].pid
                    self.kept = set(now)
            time.sleep(0.01)


def is_dask_worker(process: psutil.Process) -> bool:
    """Whether a process is one that a local cluster's nanny started to run tasks."""
    try:
        return "spawn_main" in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def identities(store: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of change of each bucket's part: both are new if a part is written again."""
    found = {}
    for path in store.glob("*/[0-9a-f]*.parquet"):
        with suppress(FileNotFoundError):  # put into the night's part meanwhile
            found[path.name] = (path.stat().st_ino, path.stat().st_mtime_ns)
    return found


@dask
def test_a_dask_worker_killed_half_way_costs_only_the_buckets_it_had_not_written(
    run_cli: Run, write_table: Callable[[int], Path], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    source = write_table(12)
    options = {"input": source, "workers": 2, "batch_size": 1}
    code, _, errors = run_cli(**options, output=tmp_path / "threads" / "out", runner="threads")
    assert code == 0, errors
    killer = Killer(tmp_path / "dask" / ".ticket-store", parts=5)
    killer.start()
    code, _, errors = run_cli(**options, output=tmp_path / "dask" / "out", runner="dask")
    killer.done.set()
    killer.join()
    assert code == 0, errors
    assert killer.killed, "no worker was there to be killed"
    assert_same(tmp_path / "dask" / "out", tmp_path / "threads" / "out")
    buckets = json.loads((tmp_path / "dask" / "out" / "manifest.json").read_text())["plan"]["buckets"]
    assert 5 <= len(killer.kept) < buckets == len(killer.seen)
    assert identities(tmp_path / "dask" / ".ticket-store") == {}
    again = {name for name in killer.kept if len(killer.seen[name]) > 1}
    record_property("buckets", buckets)
    record_property("written before the kill", len(killer.kept))
    record_property("written again", len(again))
    assert not again
