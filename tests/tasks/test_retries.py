"""Which failures a task tries again, decided on real states of Prefect."""

import pytest
from prefect.states import Failed

from tasks.retries import is_transient
from ticket_engine.errors import InputError


def failed_with(error: BaseException, cause: BaseException | None = None) -> bool:
    """Whether a task that raised this would be tried again."""
    error.__cause__ = cause
    return is_transient(None, None, Failed(data=error))


@pytest.mark.parametrize("error", [ConnectionRefusedError(), TimeoutError()])
def test_trouble_of_the_network_is_tried_again_also_behind_an_error_of_the_engine(error: OSError) -> None:
    assert failed_with(error)
    assert failed_with(InputError("the store did not answer"), error)


@pytest.mark.parametrize("cause", [None, FileNotFoundError(), ValueError()])
def test_what_a_user_must_put_right_is_not_tried_again(cause: BaseException | None) -> None:
    assert not failed_with(InputError("no such file"), cause)
