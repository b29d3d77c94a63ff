"""Runs that are killed: nothing half-written is seen, nothing finished is done again, the next run completes.

Two random moments by default; ``KILLS=20 pytest tests/flows/test_resume.py`` tries more.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("KILLS", "2"))
TICKETS = 400
pytestmark = pytest.mark.slow


class Reader(threading.Thread):
    """Opens the output folder again and again and notes what does not fit together."""

    def __init__(self, output: Path) -> None:
        super().__init__(daemon=True)
        self.output, self.problems, self.looks, self.done = output, [], 0, threading.Event()

    def run(self) -> None:
        while not self.done.is_set():
            try:
                folder = os.open(self.output, os.O_RDONLY)
            except FileNotFoundError:
                self.problems.append("no output folder")
                continue
            try:
                with open(f"/proc/self/fd/{folder}/manifest.json") as file:
                    rows = json.load(file)["rows"]["predictions"]
                found = pl.scan_parquet(f"/proc/self/fd/{folder}/predictions.parquet").select(pl.len()).collect().item()
                if found != rows:
                    self.problems.append(f"{found} rows where the manifest says {rows}")
            except FileNotFoundError:
                pass  # the folder that was opened has been replaced and is being removed
            finally:
                os.close(folder)
            self.looks += 1
            time.sleep(0.02)


@pytest.fixture(scope="module")
def start(
    prefect_server: None,
    tiny_model: Callable[[str], Path],
    labels_file: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Path, Path], subprocess.Popen]:
    """Starts a run of the command line in a process of its own."""
    from prefect.settings import PREFECT_API_URL

    environment = os.environ | {"PREFECT_API_URL": PREFECT_API_URL.value()}
    options = {
        "--labels": labels_file("billing", "delivery", "returns", "account"),
        "--model": tiny_model("llama"),
        "--dtype": "float32",
        "--threads": 1,
        "--workers": 1,
        "--batch-size": 4,
        "--spot-check": 16,
    }
    flat = [str(part) for pair in options.items() for part in pair]

    def run(source: Path, output: Path) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "flows.classify_tickets", "--input", source, "--output", output, *flat],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    return run


def finish(process: subprocess.Popen) -> None:
    """Wait for a run that must succeed."""
    errors = process.communicate(timeout=300)[1]
    assert process.returncode == 0, errors.decode()[-2000:]


def labels_of(output: Path) -> pl.DataFrame:
    """What a reader takes from an output; the bucket of a ticket depends on what was known before."""
    return pl.read_parquet(output / "predictions.parquet").drop("bucket_index")


def assert_same(found: pl.DataFrame, expected: pl.DataFrame) -> None:
    """Equal but for float32 rounding of scores: the batches of a resumed run hold other tickets together."""
    scores = ["probability", "margin", "log_probs"]
    assert found.drop(scores).equals(expected.drop(scores))
    for column in ("probability", "margin"):
        assert (found[column] - expected[column]).abs().max() < 1e-4


def test_a_run_killed_at_any_moment_loses_doubles_and_tears_nothing(
    start: Callable[[Path, Path], subprocess.Popen], tmp_path: Path
) -> None:
    table = pl.DataFrame(
        {
            "ticket_id": range(TICKETS),
            "body": [f"Where is parcel {n * n * 7}?" + " Please answer." * (n % 9) for n in range(TICKETS)],
        }
    )
    whole, small = tmp_path / "whole.parquet", tmp_path / "small.parquet"
    table.write_parquet(whole)
    table.head(10).write_parquet(small)
    started = time.monotonic()
    finish(start(whole, tmp_path / "undisturbed" / "out"))
    life = time.monotonic() - started
    expected = labels_of(tmp_path / "undisturbed" / "out")
    generator = random.Random(0)
    for number in range(KILLS):
        output = tmp_path / f"killed-{number}" / "out"
        finish(start(small, output))
        reader = Reader(output)
        reader.start()
        process = start(whole, output)
        time.sleep(life * (number + generator.random()) / KILLS)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        parts = list((output.parent / ".ticket-store").glob("*/*.parquet"))
        kept = pl.concat([pl.read_parquet(part, columns=["ticket_key"]) for part in parts]).n_unique()
        finish(start(whole, output))
        reader.done.set()
        reader.join()
        assert reader.looks > 10
        assert reader.problems == []
        plan = json.loads((output / "manifest.json").read_text())["plan"]
        assert plan["stored"] == kept, "what was finished before the kill is not done again"
        assert_same(labels_of(output), expected)
        assert not list(output.parent.glob(".out.work"))
