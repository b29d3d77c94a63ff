"""How every command line here ends: the engine's errors become one or two lines and an exit code."""

import logging
import sys

import typer
from pydantic import ValidationError

from ticket_engine.errors import TicketEngineError


def quiet_console() -> None:
    """Keep Prefect's log lines out of the terminal; the server still gets them.

    Prefect reads its settings when it is imported, which ``python -m flows.x`` does before any command
    line is looked at, so the handlers themselves are told.
    """
    from prefect.logging.handlers import PrefectConsoleHandler

    for name in ("", "prefect", "prefect.flow_runs", "prefect.task_runs"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, PrefectConsoleHandler):
                handler.setLevel(logging.CRITICAL)


def run_app(app: typer.Typer, module: str) -> None:
    """Run a command line; never returns normally on an error of the user's."""
    logging.captureWarnings(True)
    try:
        app(prog_name=f"python -m {module}")
    except ValidationError as error:
        for problem in error.errors()[:3]:
            where = ".".join(str(part) for part in problem["loc"])
            found = f"{where}: {problem['msg']} (found {problem['input']!r})" if where else problem["msg"]
            print(f"Error: {found}.", file=sys.stderr)
        sys.exit(2)
    except TicketEngineError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
