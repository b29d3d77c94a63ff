"""Which failures a task tries again."""

import errno
import re
from typing import Any

RETRIES = 2
DELAYS = [5, 20]  # seconds

# Polars gives a store's answer as a plain OSError or ComputeError, the status only in its text; it has tried some
# seconds long by then. 403 and 404 are left out: they do not pass by themselves.
_STORE = re.compile(r"object-store error")
_PASSING = re.compile(
    r"status code: (?:408|429|500|502|503|504)\b|timed out|SlowDown|connection (?:closed|reset)", re.I
)

# A disk or network file system that answers badly for a moment, or a process that has too much open.
_BUSY = frozenset({408, 429, 500, 502, 503, 504})
_FAULTS = frozenset({errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EBUSY, errno.ENOLCK})


def is_transient(_task: Any, _run: Any, state: Any) -> bool:
    """True for trouble of the network or a store, which may pass; never for a user's or a data error.

    The engine reports what it could not read as its own error, so the causes are looked at too.
    """
    error = state.result(raise_on_failure=False)
    while isinstance(error, BaseException):
        if type(error).__name__ == "OfflineModeIsEnabled":  # a ConnectionError by birth, and a setting by nature
            return False
        if isinstance(error, ConnectionError | TimeoutError | InterruptedError) or _is_passing_answer(str(error)):
            return True
        if isinstance(error, OSError) and error.errno in _FAULTS:
            return True
        if _is_passing_hub(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_passing_hub(error: BaseException) -> bool:
    """Trouble of the hub's HTTP client, whose errors are not the built-in ones; which client it is changed before."""
    names = {kind.__name__ for kind in type(error).__mro__ if kind.__module__.startswith("httpx")}
    return "TransportError" in names or getattr(getattr(error, "response", None), "status_code", 0) in _BUSY


def _is_passing_answer(text: str) -> bool:
    return bool(_STORE.search(text) and _PASSING.search(text))
