"""`make serve` as a person uses it: what it prints is run in another shell, from another folder."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 240
pytestmark = pytest.mark.slow


@pytest.fixture
def printed(tmp_path: Path) -> Iterator["Queue[str]"]:
    """The lines that `deployments/serve.sh` prints while it serves."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment = kept | {
        "BIN": os.path.relpath(Path(sys.executable).parent, ROOT),
        "PORT": str(port),
        "PREFECT_HOME": str(tmp_path / "home"),
    }
    serving = subprocess.Popen(
        ["deployments/serve.sh"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lines: Queue[str] = Queue()
    reader = threading.Thread(target=lambda: [lines.put(line.rstrip("\n")) for line in serving.stdout], daemon=True)
    reader.start()
    try:
        yield lines
    finally:
        os.killpg(serving.pid, signal.SIGINT)  # as Ctrl-C in a terminal
        serving.wait(60)
        reader.join(60)
        serving.stdout.close()


def test_the_command_that_serve_prints_works_in_another_shell(printed: "Queue[str]", tmp_path: Path) -> None:
    seen = []
    while not (seen and seen[-1].lstrip().startswith("PREFECT_API_URL=")):
        try:
            seen.append(printed.get(timeout=SECONDS))
        except Empty:
            pytest.fail("\n".join(seen))
    command = seen[-1].strip()
    assert command.endswith(" --watch")
    shell = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "COLUMNS": "200"}
    queued = subprocess.run(
        ["sh", "-c", command.removesuffix(" --watch")],  # the sample on the embedded model takes minutes
        cwd=tmp_path, env=shell, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert queued.returncode == 0, queued.stdout + queued.stderr
    assert "classify-tickets/nightly" in queued.stdout
