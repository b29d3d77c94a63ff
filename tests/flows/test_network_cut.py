"""The flow in a network namespace that has nothing but a loopback: it works, and nothing tries to leave the machine."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CUT = ["unshare", "--map-root-user", "--net", "--"]
OWN = re.compile(r"127\.\d+\.\d+\.\d+|::1|::ffff:127\.\d+\.\d+\.\d+|0\.0\.0\.0|::")
ADDRESS = re.compile(r'inet_addr\("([^"]+)"\)|inet_pton\(AF_INET6, "([^"]+)"')


def why_not() -> str | None:
    """Why a network cannot be cut here, or None."""
    for tool in ("unshare", "strace", "ip"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    tried = subprocess.run([*CUT, "ip", "link", "set", "lo", "up"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"no network namespace: {tried.stderr.strip()}"


REASON = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


def run_cut(command: list[str], trace: Path, home: Path) -> subprocess.CompletedProcess:
    """Run a command with a loopback only; every address that it or its children wanted is in the trace."""
    hidden = ("PREFECT_", "HF_", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    script = 'ip link set lo up && exec strace --seccomp-bpf -f -qq -e trace=connect,sendto,sendmsg,sendmmsg -s 0 -o "$0" "$@"'
    return subprocess.run(
        [*CUT, "sh", "-c", script, str(trace), *command],
        cwd=ROOT,
        env=environment | {"PREFECT_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def wanted(trace: Path) -> set[str]:
    """Addresses of the internet families that are not this machine's own."""
    found = {one or other for one, other in ADDRESS.findall(trace.read_text(errors="replace"))}
    return {address for address in found if not OWN.fullmatch(address)}


def test_a_try_to_leave_would_be_seen(tmp_path: Path) -> None:
    script = "import socket\ntry:\n    socket.create_connection(('192.0.2.1', 443), 2)\nexcept OSError:\n    pass"
    done = run_cut([sys.executable, "-c", script], tmp_path / "trace", tmp_path / "home")
    assert done.returncode == 0, done.stderr
    assert wanted(tmp_path / "trace") == {"192.0.2.1"}


def test_with_the_network_cut_the_flow_publishes_and_nothing_tries_to_leave(
    tiny_model: Callable[[str], Path], labels_file: Callable[..., Path], tickets_file: Path, tmp_path: Path
) -> None:
    options = {
        "--input": tickets_file,
        "--output": tmp_path / "out",
        "--labels": labels_file("billing", "delivery", "returns", "account"),
        "--model": tiny_model("llama"),
        "--dtype": "float32",
        "--threads": 1,
        "--workers": 1,
    }
    flat = [str(part) for pair in options.items() for part in pair]
    command = [sys.executable, "-m", "flows.classify_tickets", *flat]
    done = run_cut(command, tmp_path / "trace", tmp_path / "home")
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "out" / "manifest.json").is_file()
    assert "127.0.0.1" in (tmp_path / "trace").read_text(errors="replace"), "the trace saw the flow's own server"
    assert wanted(tmp_path / "trace") == set()


def test_with_the_network_cut_a_hub_model_ends_with_exit_code_2_and_says_why(
    labels_file: Callable[..., Path], tickets_file: Path, tmp_path: Path
) -> None:
    labels = str(labels_file("billing", "delivery"))
    command = [sys.executable, "-m", "flows.classify_tickets", "--input", str(tickets_file), "--labels", labels]
    command += ["--output", str(tmp_path / "out"), "--model", "nobody/no-such-model"]
    done = run_cut(command, tmp_path / "trace", tmp_path / "home")
    assert done.returncode == 2, done.stderr[-2000:]
    assert "nobody/no-such-model cannot be fetched from the hub" in done.stderr
    assert not (tmp_path / "out").exists()
