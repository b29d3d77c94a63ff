"""Which failures a task tries again, decided on real states of Prefect."""

import errno

import pytest
from polars.exceptions import ComputeError
from prefect.states import Failed

from tasks.retries import is_transient
from ticket_engine.errors import InputError, StoreError


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
