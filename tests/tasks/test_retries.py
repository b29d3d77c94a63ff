"""Which failures a task tries again, decided on real states of Prefect."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from polars.exceptions import ComputeError
from prefect.states import Failed

from tasks.retries import is_transient
from ticket_engine.errors import InputError, StoreError

ROOT = Path(__file__).parents[2]


def failed_with(error: BaseException, cause: BaseException | None = None) -> bool:
    """Whether a task that raised this would be tried again."""
    error.__cause__ = cause
    return is_transient(None, None, Failed(data=error))


@pytest.mark.parametrize("error", [ConnectionRefusedError(), TimeoutError()])
def test_trouble_of_the_network_is_tried_again_also_behind_an_error_of_the_engine(error: OSError) -> None:
    assert failed_with(error)
    assert failed_with(InputError("the store did not answer"), error)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.ESTALE])
def test_a_fault_of_the_disk_or_the_system_is_tried_again(code: int) -> None:
    assert failed_with(StoreError("cannot be read"), OSError(code, "fault"))
    assert not failed_with(StoreError("cannot be read"), OSError(errno.EACCES, "not allowed"))


@pytest.mark.parametrize("cause", [None, FileNotFoundError(), ValueError()])
def test_what_a_user_must_put_right_is_not_tried_again(cause: BaseException | None) -> None:
    assert not failed_with(InputError("no such file"), cause)


@pytest.mark.parametrize("kind", [OSError, ComputeError])
@pytest.mark.parametrize(("status", "again"), [(503, True), (429, True), (500, True), (403, False), (404, False)])
def test_what_a_store_answered_decides_whether_it_is_asked_again(kind: type, status: int, again: bool) -> None:
    answer = kind(f"object-store error: Generic S3 error: Server returned non-2xx status code: {status} Reason: ")
    assert failed_with(InputError("the store did not answer"), answer) is again


@pytest.mark.parametrize(
    ("endpoint", "again"), [("http://127.0.0.1:9", True), ("http://nowhere.invalid", True), (None, False)]
)
def test_a_hub_that_cannot_be_reached_is_asked_again_and_offline_mode_is_not(
    endpoint: str | None, again: bool, tmp_path: Path
) -> None:
    code = (
        "from prefect.states import Failed\n"
        "from tasks.retries import is_transient\n"
        "from ticket_engine.errors import ModelError\n"
        "from ticket_engine.models import find_model\n"
        "try:\n"
        "    find_model('owner/name')\n"
        "except ModelError as error:\n"
        "    print(is_transient(None, None, Failed(data=error)))\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"} if endpoint else {"HF_HUB_OFFLINE": "1"}
    environment |= {"HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == str(again), done.stderr[-500:]
