"""Which failures a task tries again."""

from typing import Any

RETRIES = 2
DELAYS = [5, 20]  # seconds


def is_transient(_task: Any, _run: Any, state: Any) -> bool:
    """True for trouble of the network or a store, which may pass; never for a user's or a data error."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, ConnectionError | TimeoutError | InterruptedError)
