"""Tickets in an S3-compatible store (a moto server on a loopback port) through the flow."""

import importlib.util
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import polars as pl
import pytest

Run = Callable[..., tuple[int, str, str]]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("moto") is None, reason="moto is not installed"),
]


class Store:
    """A store that answers 503 as often as ``refusals`` says before it works; ``requests`` counts all."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        self.requests, self.refusals = 0, 0
        self._lock, self._inner = threading.Lock(), DomainDispatcherApplication(create_backend_app)
        self.server = make_server("127.0.0.1", 0, self, threaded=True)
        self.url = f"http://127.0.0.1:{self.server.port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __call__(self, environ: dict, start_response: Callable) -> Iterable[bytes]:
        with self._lock:
            self.requests += 1
            refused = self.refusals > 0
            self.refusals -= refused
        if refused:
            start_response("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        return self._inner(environ, start_response)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, sample_tickets: pl.DataFrame, tmp_path: Path) -> Iterator[Store]:
    """A store with the sample in two files below ``s3://tickets/run_date=2026-11-30/``."""
    import boto3

    store = Store()
    for name, value in {
        "AWS_ENDPOINT_URL": store.url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="tickets")
    for number, part in enumerate((sample_tickets.head(5), sample_tickets.tail(-5))):
        part.write_parquet(tmp_path / "part.parquet")
        client.upload_file(str(tmp_path / "part.parquet"), "tickets", f"run_date=2026-11-30/{number}.parquet")
    store.requests = 0
    yield store
    store.server.shutdown()
    store.server.server_close()


def test_tickets_are_read_from_an_object_store(
    run_cli: Run, store: Store, sample_tickets: pl.DataFrame, tmp_path: Path
) -> None:
    source = "s3://tickets/run_date={run_date}/*.parquet"
    code, _, errors = run_cli(input=source, output=tmp_path / "out", run_date="2026-11-30")
    assert code == 0, errors
    assert pl.read_parquet(tmp_path / "out" / "predictions.parquet")["ticket_id"].equals(sample_tickets["ticket_id"])
    assert store.requests > 0


def test_a_store_that_is_busy_for_a_while_is_asked_again(run_cli: Run, store: Store, tmp_path: Path) -> None:
    store.refusals = 18  # more than Polars tries by itself
    code, _, errors = run_cli(input="s3://tickets/run_date=2026-11-30/0.parquet", output=tmp_path / "out")
    assert code == 0, errors
    assert store.refusals == 0
    assert len(pl.read_parquet(tmp_path / "out" / "predictions.parquet")) == 5


def test_what_is_not_in_a_store_is_told_at_once_and_nothing_is_published(
    run_cli: Run, store: Store, tmp_path: Path
) -> None:
    code, _, errors = run_cli(input="s3://tickets/elsewhere.parquet", output=tmp_path / "out")
    assert code == 2
    assert "s3://tickets/elsewhere.parquet cannot be read" in errors
    assert not (tmp_path / "out").exists()
    assert store.requests < 10, "not asked again: it does not pass by itself"
