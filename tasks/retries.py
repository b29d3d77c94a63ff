"""Which failures a task tries again."""

from typing import Any

RETRIES = 2
DELAYS = [5, 20]  # seconds


def is_transient(_task: Any, _run: Any, state: Any) -> bool:
    """True for trouble of the network or a store, which may pass; never for a user's or a data error.

    The engine reports what it could not read as its own error, so the causes are looked at too.
    """
    error = state.result(raise_on_failure=False)
    while isinstance(error, BaseException):
        if isinstance(error, ConnectionError | TimeoutError | InterruptedError):
            return True
        error = error.__cause__
    return False
