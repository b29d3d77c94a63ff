"""Suite files: which expectations a contract has, and the thresholds that a run may override."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ticket_engine.errors import SettingsError

PARAMETER = "$PARAMETER"


def read_suite(path: str | Path) -> dict:
    """A suite file: ``name``, ``meta.parameters`` (thresholds with their defaults) and ``expectations``.

    Raises:
        SettingsError: The file is missing or not such a suite.
    """
    try:
        suite = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"The contract {path} cannot be read: {error.strerror}. Name a suite file.") from None
    except ValueError as error:
        raise SettingsError(f"The contract {path} is not JSON: {error}.") from None
    problem = _find_problem(suite)
    if problem:
        raise SettingsError(f"The contract {path} is not usable: {problem}. docs/contracts.md shows the form.")
    return suite


def _find_problem(suite: Any) -> str:
    if not isinstance(suite, dict) or not isinstance(suite.get("name"), str):
        return "it has no name"
    if not isinstance(suite.get("meta"), dict) or not isinstance(suite["meta"].get("parameters", {}), dict):
        return "meta.parameters is not a list of thresholds with numbers"
    for name, value in suite["meta"].get("parameters", {}).items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"the parameter {name} is not a number"
    entries = suite.get("expectations")
    if not isinstance(entries, list) or not entries:
        return "it has no expectations"
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
            return f"expectation {number} has no type"
        if not isinstance(entry.get("kwargs", {}), dict) or not isinstance(entry.get("meta", {}), dict):
            return f"kwargs or meta of expectation {number} are not in braces"
        if entry.get("severity", "critical") not in ("critical", "warning", "info"):
            return f"expectation {number} has the severity {entry['severity']!r}, not critical, warning or info"
    return ""


def read_thresholds(suites: list[dict], overrides: dict[str, float]) -> dict[str, float]:
    """The thresholds of both contracts with a run's overrides.

    Raises:
        SettingsError: An override names no threshold of these suites.
    """
    known = {name: value for suite in suites for name, value in suite["meta"].get("parameters", {}).items()}
    unknown = sorted(set(overrides) - set(known))
    if unknown:
        raise SettingsError(f"No contract has a parameter {unknown[0]!r}. Known: {', '.join(sorted(known))}.")
    return known | overrides


def check_parameters(suite: dict, known: set[str]) -> None:
    """Make sure that every ``$PARAMETER`` of a suite has a value before anything runs.

    Args:
        suite: From `read_suite`.
        known: Names of the thresholds and of the figures that the run measures.

    Raises:
        SettingsError: An expectation uses another name.
    """
    for entry in suite["expectations"]:
        for name in _used(entry.get("kwargs", {})):
            if name not in known:
                raise SettingsError(
                    f"The contract {suite['name']} uses {name!r} in {title(entry)!r}, which no run measures. Put it "
                    f"under meta.parameters, or use one of: {', '.join(sorted(known))}."
                )


def _used(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if set(value) == {PARAMETER}:
            yield value[PARAMETER]
        for item in value.values():
            yield from _used(item)
    elif isinstance(value, list):
        for item in value:
            yield from _used(item)


def title(entry: dict) -> str:
    """Short name of a suite's expectation."""
    return entry.get("meta", {}).get("title") or entry["type"]


def with_severity(suite: dict, kind: str, severity: str) -> dict:
    """The suite with another severity for the expectations of one type."""
    entries = [entry | {"severity": severity} if entry["type"] == kind else entry for entry in suite["expectations"]]
    return suite | {"expectations": entries}
