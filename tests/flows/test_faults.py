"""What goes wrong in the night, through the flow: nothing is published, nothing is torn, and the next run completes."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl
import pytest

ROOT = Path(__file__).parents[2]
Run = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.slow


def tree(folder: Path) -> dict[str, bytes]:
    """Names and contents of all files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(disk), b"tmpfs", 0, b"size=4m"):
        pytest.skip(f"a small disk cannot be mounted here: {os.strerror(ctypes.get_errno())}")
    yield disk
    assert libc.umount2(os.fsencode(disk), 2) == 0  # MNT_DETACH


@pytest.fixture
def start_run(
    prefect_server: None, tiny_model: Callable[[str], Path], labels_file: Callable[..., Path]
) -> Callable[[Path, Path], subprocess.Popen]:
    """Starts the command line on a tiny model in a process of its own, in many small buckets."""
    from prefect.settings import PREFECT_API_URL

    options = {
        "--labels": labels_file("billing", "delivery", "returns", "account"),
        "--model": tiny_model("llama"),
        "--dtype": "float32",
        "--threads": 1,
        "--workers": 1,
        "--batch-size": 2,
    }
    flat = [str(part) for pair in options.items() for part in pair]

    def run(source: Path, output: Path) -> subprocess.Popen:
        command = [sys.executable, "-m", "flows.classify_tickets", "--input", str(source), "--output", str(output)]
        environment = os.environ | {"PREFECT_API_URL": PREFECT_API_URL.value()}
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([*command, *flat], cwd=ROOT, env=environment, **pipes)

    return run


@pytest.fixture
def long_table(tmp_path: Path) -> Path:
    """300 tickets, each with a text of its own."""
    path = tmp_path / "long.parquet"
    bodies = [f"Where is parcel {n * n * 7}?" + " Please answer." * (n % 9) for n in range(300)]
    pl.DataFrame({"ticket_id": range(300), "body": bodies}).write_parquet(path)
    return path


def wait_for_parts(store: Path, count: int, process: subprocess.Popen) -> None:
    """Until a run has scored so many buckets."""
    deadline = time.monotonic() + 120
    while len(list(store.glob("*/*.parquet"))) < count:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("free_kilobytes", [0, 16, 64])
def test_a_full_disk_ends_in_two_lines_and_the_next_run_completes(
    run_cli: Run, long_table: Path, tickets_file: Path, small_disk: Path, free_kilobytes: int
) -> None:
    output, filler = small_disk / "out", small_disk / "filler"
    code, _, errors = run_cli(input=tickets_file, output=output)
    assert code == 0, errors
    before = tree(output)
    room = os.statvfs(small_disk)
    filler.write_bytes(b"x" * (room.f_bavail * room.f_frsize - free_kilobytes * 1024))
    code, _, errors = run_cli(input=long_table, output=output)
    assert code == 2, errors
    assert "no room left" in errors
    assert len(errors.splitlines()) <= 2
    assert tree(output) == before
    assert not (small_disk / ".out.work").exists()
    filler.unlink()
    code, _, errors = run_cli(input=long_table, output=output)
    assert code == 0, errors
    assert len(pl.read_parquet(output / "predictions.parquet")) == 300


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_cancelled_run_publishes_nothing_and_the_next_does_only_the_rest(
    start_run: Callable, run_cli: Run, long_table: Path, tmp_path: Path, number: signal.Signals
) -> None:
    output, store = tmp_path / "here" / "out", tmp_path / "here" / ".ticket-store"
    process = start_run(long_table, output)
    wait_for_parts(store, 3, process)
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode != 0
    assert not output.exists()
    kept = pl.scan_parquet(store / "*" / "*.parquet").select(pl.len()).collect().item()
    code, _, errors = run_cli(input=long_table, output=output, workers=1, batch_size=2)
    assert code == 0, errors
    plan = json.loads((output / "manifest.json").read_text())["plan"]
    assert plan["stored"] == kept
    assert len(pl.read_parquet(output / "predictions.parquet")) == 300


def test_of_two_runs_on_one_output_the_second_is_refused_and_the_first_completes(
    start_run: Callable, run_cli: Run, long_table: Path, tickets_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "here" / "out"
    first = start_run(long_table, output)
    wait_for_parts(tmp_path / "here" / ".ticket-store", 1, first)
    first.send_signal(signal.SIGSTOP)  # in the midst of its work for as long as the second tries
    try:
        code, _, errors = run_cli(input=tickets_file, output=output)
    finally:
        first.send_signal(signal.SIGCONT)
    assert code == 2
    assert f"Another run is writing to {output}" in errors
    problems = first.communicate(timeout=300)[1]
    assert first.returncode == 0, problems
    assert len(pl.read_parquet(output / "predictions.parquet")) == 300
    code, _, errors = run_cli(input=tickets_file, output=output)
    assert code == 0, errors


def test_a_poisoned_ticket_is_put_in_quarantine_with_its_reason_and_the_rest_goes_on(
    run_cli: Run, poisoned_model: Path, tmp_path: Path
) -> None:
    bodies = [f"Where is parcel {n * n}? I have waited {n} days." + " Please answer." * (n % 9) for n in range(80)]
    bodies[17] = "Die Straße ist gesperrt."
    table = pl.DataFrame({"ticket_id": range(80), "body": bodies, "channel": ["mail"] * 80})
    table.write_parquet(tmp_path / "tickets.parquet")
    code, _, errors = run_cli(
        input=tmp_path / "tickets.parquet", output=tmp_path / "out", model=poisoned_model, spot_check=16
    )
    assert code == 0, errors
    quarantined = pl.read_parquet(tmp_path / "out" / "quarantine.parquet")
    assert quarantined.drop("reason").to_dicts() == table[17].to_dicts()
    assert "finite" in quarantined["reason"][0]
    predicted = pl.read_parquet(tmp_path / "out" / "predictions.parquet")["ticket_id"].to_list()
    assert predicted == [n for n in range(80) if n != 17]
