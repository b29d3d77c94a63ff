"""What is looked at while a flow runs: its server, its memory, and its output through a reader's eyes."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from datetime import datetime
from pathlib import Path

import polars as pl
import psutil

SECONDS_BETWEEN_SAMPLES = 0.25


class FlowServer:
    """A Prefect server on a free loopback port with a home of its own."""

    def __init__(self, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.api = f"http://127.0.0.1:{port}/api"
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")} | {
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": self.api,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
        }
        command = [str(Path(sys.executable).parent / "prefect"), "server", "start", "--port", str(port)]
        self.log = (home / "server.log").open("w")
        self.process = subprocess.Popen(command, env=self.environment, stdout=self.log, stderr=self.log)
        self._wait()

    def post(self, path: str, body: dict) -> list | int:
        """An answer of the server's API."""
        data, head = json.dumps(body).encode(), {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self.api + path, data, head), timeout=60) as answer:
            return json.load(answer)

    def last_run(self) -> tuple[dict, list[dict]]:
        """The newest flow run with its ``seconds``, and each of its task runs with ``stage``, ``start`` and ``end``."""
        (run,) = self.post("/flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 1})
        wanted = {"flow_runs": {"id": {"any_": [run["id"]]}}}
        count = -1
        while count != (count := self.post("/task_runs/count", wanted)):
            time.sleep(3)  # task runs reach the database a moment after they end
        tasks = []
        for offset in range(0, count, 200):
            tasks += self.post("/task_runs/filter", wanted | {"limit": 200, "offset": offset, "sort": "ID_DESC"})
        seconds = _moment(run["end_time"]) - _moment(run["start_time"])
        return run | {"seconds": seconds}, [_times(task) for task in tasks]

    def stop(self) -> None:
        """End the server and wait for it."""
        self.process.terminate()
        self.process.wait(60)
        self.log.close()

    def _wait(self) -> None:
        for _ in range(180):
            try:
                with urllib.request.urlopen(f"{self.api}/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        raise SystemExit(f"The server did not start: see {self.log.name}")


class Reader(threading.Thread):
    """Opens a published folder again and again and notes what does not fit together."""

    def __init__(self, output: Path) -> None:
        super().__init__(daemon=True)
        self.output, self.problems, self.looks = output, [], 0
        self._seen_once, self._done = output.exists(), threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.2):
            try:
                folder = os.open(self.output, os.O_RDONLY)
            except FileNotFoundError:
                if self._seen_once:
                    self.problems.append("no output folder")
                continue
            self._seen_once = True
            try:
                here = Path(f"/proc/self/fd/{folder}")
                rows = json.loads((here / "manifest.json").read_text())["rows"]["predictions"]
                found = pl.scan_parquet(here / "predictions.parquet").select(pl.len()).collect().item()
                if found != rows:
                    self.problems.append(f"{found} rows where the manifest says {rows}")
            except FileNotFoundError:
                pass  # the folder that was opened has been replaced twice and is being removed
            finally:
                os.close(folder)
            self.looks += 1

    def stop(self) -> None:
        """End it and wait for it."""
        self._done.set()
        self.join()


def watch_memory(process: subprocess.Popen) -> list[tuple[float, int]]:
    """Moments (seconds since 1970) and resident bytes of a process until it ends."""
    samples, watched = [(time.time(), 0)], psutil.Process(process.pid)
    while process.poll() is None:
        try:
            samples.append((time.time(), watched.memory_info().rss))
        except psutil.NoSuchProcess:
            break
        time.sleep(SECONDS_BETWEEN_SAMPLES)
    process.wait()
    return [*samples, (time.time(), 0)]


def _moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _times(task: dict) -> dict:
    is_bucket = task["name"].startswith("bucket ")
    start, end = _moment(task["start_time"]), _moment(task["end_time"])
    return {"stage": "classify-bucket" if is_bucket else task["name"], "start": start, "end": end}
