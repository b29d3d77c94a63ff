"""Worker processes of which only the one that is asked runs; the others are stopped by the kernel."""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Self

from benchmarks.peers.environments import ROOT, python_of

PATIENCE = 400


class WorkerError(Exception):
    """A worker ended or did not answer; carries the end of its log."""


class Worker:
    """A process with its model loaded. Owns its process group; leave the ``with`` block to end it.

    Args:
        name: Of the environment, ``ours`` for this one.
        script: Under ``benchmarks/peers``.
        job: What it loads and the works that it may be asked for, written to a file.
        environment: Further variables.
    """

    def __init__(self, name: str, script: str, job: dict, *, folder: Path, environment: dict[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"{name}.log"
        path = folder / f"{name}.json"
        path.write_text(json.dumps(job), encoding="utf-8")
        self.started = time.perf_counter()
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [str(python_of(name)), str(Path(__file__).parent / script), str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT) if name == "ours" else ""} | environment,
                start_new_session=True,
                text=True,
                bufsize=1,
            )

    def __enter__(self) -> Self:
        try:
            self._read()
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def ask(self, work: str) -> dict:
        """Seconds and labels of one run; all other workers stand still."""
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"work": work}) + "\n")
            self._process.stdin.flush()
            return self._read()
        except BrokenPipeError as error:
            raise self._ended("ended") from error
        finally:
            self._signal(signal.SIGSTOP)

    def since_start(self) -> float:
        """Seconds since the process was started."""
        return time.perf_counter() - self.started

    def _read(self) -> dict:
        if not select.select([self._process.stdout], [], [], PATIENCE)[0]:
            raise self._ended(f"did not answer in {PATIENCE} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._ended("ended")
        return json.loads(line)

    def _ended(self, what: str) -> WorkerError:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return WorkerError(f"The worker {what}. The end of its log:\n" + "\n".join(lines[-12:]))

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
