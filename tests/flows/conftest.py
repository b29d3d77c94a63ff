"""One Prefect server for the tests of a session, with a home of its own."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl
import pytest


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A temporary Prefect server and database."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture(scope="session")
def contracts_folder() -> Path:
    """Where the project's own suites are; the flow's defaults are relative to the project's root."""
    return Path(__file__).parents[2] / "data_contracts"


@pytest.fixture
def run_cli(
    prefect_server: None,
    tiny_model: Callable[[str], Path],
    labels_file: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    contracts_folder: Path,
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line in this process on a tiny model; exit code, stdout and stderr."""
    from flows import cli

    defaults = {
        "--labels": str(labels_file("billing", "delivery", "returns", "account")),
        "--model": str(tiny_model("llama")),
        "--dtype": "float32",
        "--threads": "1",
        "--tickets-contract": str(contracts_folder / "tickets.json"),
        "--predictions-contract": str(contracts_folder / "predictions.json"),
    }

    def run(**options: object) -> tuple[int, str, str]:
        given = defaults | {"--" + name.replace("_", "-"): str(value) for name, value in options.items()}
        arguments = [part for pair in given.items() for part in pair if pair[1] != "None"]
        monkeypatch.setattr(sys, "argv", ["classify_tickets", *arguments])
        capsys.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def tickets_file(tmp_path: Path, sample_tickets: pl.DataFrame) -> Path:
    """The sample tickets as Parquet."""
    path = tmp_path / "tickets.parquet"
    sample_tickets.write_parquet(path)
    return path
