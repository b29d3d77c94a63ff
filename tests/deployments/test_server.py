"""The README's deployment on a real server with a fresh home: deployed, run by a worker, looked at in a browser."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl
import psutil
import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium")
SECONDS = 300
pytestmark = pytest.mark.slow
with_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: run `make browser`")


class Server:
    """A Prefect server and its environment."""

    def __init__(self, home: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.home = home
        self.url = f"http://127.0.0.1:{self.port}"
        self.worker: subprocess.Popen | None = None
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")} | {
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": f"{self.url}/api",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
            "CLASSIFY_TICKETS_ROOT": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "DO_NOT_TRACK": "1",
            "NO_COLOR": "1",
            "COLUMNS": "200",
        }

    def start(self, *command: str) -> subprocess.Popen:
        """A long-running prefect command, its output in the home."""
        with (self.home / f"{command[0]}.log").open("w") as log:
            return subprocess.Popen(
                ["prefect", *command], cwd=ROOT, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def run(self, *command: str) -> str:
        """A prefect command that ends; what it printed."""
        done = subprocess.run(
            ["prefect", "--no-prompt", *command],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def post(self, path: str, body: dict) -> list | dict:
        """An answer of the server's API."""
        request = urllib.request.Request(
            f"{self.url}/api{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def wait(self) -> None:
        """Until the server is healthy."""
        for _ in range(SECONDS):
            try:
                with urllib.request.urlopen(f"{self.url}/api/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        pytest.fail((self.home / "server.log").read_text()[-2000:])


def stop(process: subprocess.Popen) -> None:
    """End a process and its children; one that has ended already is left alone."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with pool, deployments and worker, as the README says."""
    server = Server(tmp_path_factory.mktemp("home"))
    processes = [server.start("server", "start", "--host", "127.0.0.1", "--port", str(server.port))]
    try:
        server.wait()
        server.run("work-pool", "create", "--type", "process", "tickets")
        server.run("deploy", "--prefect-file", "deployments/prefect.yaml", "--all")
        server.run("automation", "create", "--from-file", "deployments/automations/crash-without-heartbeat.yaml")
        server.worker = server.start("worker", "start", "--pool", "tickets")
        processes.append(server.worker)
        yield server
    finally:
        for process in reversed(processes):
            stop(process)


@pytest.fixture(scope="module")
def finished(
    server: Server,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Callable[[str], Path],
    labels_file: Callable[..., Path],
) -> tuple[dict, Path]:
    """A flow run of the nightly deployment on a tiny model, and its output."""
    folder = tmp_path_factory.mktemp("night")
    tickets = pl.DataFrame({"ticket_id": range(60), "body": [f"Where is parcel {n * n}?" for n in range(60)]})
    tickets.write_parquet(folder / "tickets-2026-11-30.parquet")
    settings = {
        "input": str(folder / "tickets-{run_date}.parquet"),
        "labels": str(labels_file("billing", "delivery", "returns", "account")),
        "output": str(folder / "out" / "run_date={run_date}"),
        "model": str(tiny_model("llama")),
        "run_date": "2026-11-30",
        "dtype": "float32",
        "batch_size": 4,
    }
    server.run(
        "deployment", "run", "classify-tickets/nightly", "--watch", "--params", json.dumps({"settings": settings})
    )
    ended = {"state": {"type": {"any_": ["COMPLETED", "FAILED", "CRASHED"]}}}
    (run,) = server.post("/flow_runs/filter", {"flow_runs": ended})
    return run, folder / "out" / "run_date=2026-11-30"


def look_for(words: str, url: str, picture: Path, home: Path) -> str:
    """`look` until the page shows some words: the server may need longer than a page waits for it."""
    deadline = time.monotonic() + 240
    while words not in (page := look(url, picture, home)):
        assert time.monotonic() < deadline, f"{url} does not show {words!r}"
    return page


def look(url: str, picture: Path, home: Path) -> str:
    """Take a picture of a page in headless Chromium; the page's text as HTML."""
    flags = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
        f"--user-data-dir={home / 'chromium'}", "--window-size=1500,1400", "--virtual-time-budget=20000",
    ]  # fmt: skip
    subprocess.run([*flags, f"--screenshot={picture}", url], capture_output=True, timeout=120, check=True)
    return subprocess.run([*flags, "--dump-dom", url], capture_output=True, text=True, timeout=120, check=True).stdout


def test_the_nightly_deployment_runs_from_the_worker_and_publishes(finished: tuple[dict, Path]) -> None:
    run, output = finished
    assert run["state_type"] == "COMPLETED", run["state"]["message"]
    assert run["name"] == "classify 2026-11-30: 60 rows"
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["rows"]["predictions"] == len(pl.read_parquet(output / "predictions.parquet")) == 60


def test_buckets_are_mapped_task_runs_named_by_bucket_and_lengths(server: Server, finished: tuple[dict, Path]) -> None:
    run, output = finished
    tasks = server.post("/task_runs/filter", {"flow_runs": {"id": {"any_": [run["id"]]}}, "limit": 200})
    buckets = [task["name"] for task in tasks if task["name"].startswith("bucket 0")]
    assert len(buckets) == json.loads((output / "manifest.json").read_text())["plan"]["buckets"] > 1
    assert all("tickets of" in name and "tokens" in name for name in buckets)


def test_the_artifacts_say_what_the_manifest_says(server: Server, finished: tuple[dict, Path]) -> None:
    run, output = finished
    artifacts = server.post("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}, "limit": 200})
    by_key = {artifact["key"]: artifact for artifact in artifacts}
    assert {"run-summary", "bucket-plan", "spot-check", "classified"} <= set(by_key)
    manifest = json.loads((output / "manifest.json").read_text())
    assert f"# {manifest['rows']['predictions']} tickets labelled" in by_key["run-summary"]["data"]
    assert float(by_key["classified"]["data"]) == 100
    verdicts = json.loads(by_key["contracts"]["data"])
    assert next(iter(verdicts[0])) == "verdict"
    assert {row["verdict"] for row in verdicts} == {"passed"}
    assert not any("Where is parcel" in json.dumps(artifact["data"]) for artifact in artifacts)


@with_browser
def test_the_pages_can_be_looked_at(server: Server, finished: tuple[dict, Path], tmp_path: Path) -> None:
    run, _ = finished
    pictures = Path(os.environ.get("SCREENSHOTS", tmp_path))
    pictures.mkdir(parents=True, exist_ok=True)
    (deployment,) = [item for item in server.post("/deployments/filter", {"limit": 10}) if item["name"] == "nightly"]
    page = f"{server.url}/runs/flow-run/{run['id']}"
    look_for("classify 2026-11-30: 60 rows", page, pictures / "flow-run.png", tmp_path)
    look_for("run-summary", f"{server.url}/artifacts", pictures / "artifacts.png", tmp_path)
    form = f"{server.url}/deployments/deployment/{deployment['id']}/run"
    look_for("Labels file", form, pictures / "form.png", tmp_path)


@with_browser
def test_the_numbers_on_the_contract_page_are_those_of_the_manifest(
    finished: tuple[dict, Path], tmp_path: Path
) -> None:
    _, output = finished
    manifest = json.loads((output / "manifest.json").read_text())
    picture = Path(os.environ.get("SCREENSHOTS", tmp_path)) / "contracts.png"
    page = look((output / "data_docs" / "index.html").as_uri(), picture, tmp_path)

    def shown(kind: str) -> dict[str, int]:
        found = re.findall(rf'data-{kind}="([^"]+)"[^>]*>([^<]*)<', page)
        return {name: int(value.replace(",", "")) for name, value in found}

    rows, check = manifest["rows"], manifest["spot_check"]
    expected = {name: rows[key] for name, key in (("rows", "input"), ("quarantined", "quarantine"))}
    expected |= {name: rows[name] for name in ("predictions", "truncated")}
    assert shown("figure") == expected
    assert shown("label") == manifest["labels"]
    assert shown("spot-check") == {name: check[name] for name in ("sampled", "agreed", "near_ties", "disagreed")}
    names = re.findall(r'data-expectation="([^"]+)"', page)
    stages = manifest["contracts"].values()
    assert sorted(names) == sorted(item["name"] for report in stages for item in report["expectations"])


def test_the_automation_and_both_deployments_are_registered(server: Server) -> None:
    names = {item["name"] for item in server.post("/deployments/filter", {"limit": 10})}
    assert {"nightly", "backfill"} <= names
    automations = server.post("/automations/filter", {})
    assert any("heartbeat" in automation["name"] for automation in automations)


def test_a_run_whose_machine_died_is_marked_as_crashed(
    server: Server, tmp_path: Path, tiny_model: Callable[[str], Path], labels_file: Callable[..., Path]
) -> None:
    rows = 20_000
    tickets = pl.DataFrame({"ticket_id": range(rows), "body": [f"Where is parcel {n * n}?" for n in range(rows)]})
    tickets.write_parquet(tmp_path / "tickets.parquet")
    settings = {
        "input": str(tmp_path / "tickets.parquet"),
        "labels": str(labels_file("billing", "delivery")),
        "output": str(tmp_path / "out"),
        "model": str(tiny_model("llama")),
        "run_date": "2026-11-29",
        "dtype": "float32",
        "batch_size": 4,
    }
    server.run("deployment", "run", "classify-tickets/nightly", "--params", json.dumps({"settings": settings}))

    def running() -> list[dict]:
        return server.post("/flow_runs/filter", {"flow_runs": {"state": {"type": {"any_": ["RUNNING"]}}}})

    def state() -> dict:
        return server.post("/flow_runs/filter", {"flow_runs": {"id": {"any_": [run["id"]]}}})[0]["state"]

    def heartbeats() -> int:
        named = {
            "event": {"name": ["prefect.flow-run.heartbeat"]},
            "resource": {"id": [f"prefect.flow-run.{run['id']}"]},
        }
        return server.post("/events/filter", {"filter": named})["total"]

    wait_until(lambda: bool(running()), 120)
    (run,) = running()
    wait_until(lambda: heartbeats() > 0, 60)
    for process in [*psutil.Process(server.worker.pid).children(recursive=True), psutil.Process(server.worker.pid)]:
        process.kill()
    assert state()["type"] == "RUNNING"
    wait_until(lambda: state()["type"] == "CRASHED", 240)
    assert state()["message"] == "No heartbeat for 90 seconds. Run again; what was scored is kept."
    assert not (tmp_path / "out").exists()


def wait_until(holds: Callable[[], bool], seconds: float) -> None:
    """Until something holds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.5)
