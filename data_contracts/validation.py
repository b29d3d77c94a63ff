"""One suite run by Great Expectations over one table; the only module that starts it."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import pandas as pd
import polars as pl

from data_contracts.reports import CRITICAL, DOCS_FOLDER, ContractReport, ExpectationResult
from data_contracts.suites import check_parameters, title
from data_contracts.tables import TICKET_ID
from ticket_engine.errors import SettingsError

if TYPE_CHECKING:
    from great_expectations.core import ExpectationSuite, ExpectationValidationResult

MOST_EXAMPLES = 20


def run_suite(
    suite: dict, table: pl.DataFrame, parameters: dict[str, Any], *, folder: Path | None, heading: str = ""
) -> ContractReport:
    """Run a suite over a table.

    Args:
        suite: From `suites.read_suite`.
        table: With a column ``ticket_id``, whose values are the examples; no ticket text.
        parameters: Values of the suite's ``$PARAMETER``s: thresholds and figures, in JSON types.
        folder: Where ``data_docs/NAME.html`` is written; None for no page.
        heading: Title of that page.

    Raises:
        SettingsError: The suite has an expectation that Great Expectations does not know or cannot read.
    """
    with _quiet_great_expectations() as gx:
        made = build_suite(suite, parameters)
        context = gx.get_context(mode="ephemeral")
        context.variables.progress_bars = {"globally": False}
        source = context.data_sources.add_pandas("run").add_dataframe_asset(suite["name"])
        definition = gx.ValidationDefinition(
            name=suite["name"], data=source.add_batch_definition_whole_dataframe("all"), suite=context.suites.add(made)
        )
        result = context.validation_definitions.add(definition).run(
            batch_parameters={"dataframe": arrow_backed(table.select(_columns(suite, table)))},
            expectation_parameters=parameters,
            result_format={"result_format": "COMPLETE", "partial_unexpected_count": MOST_EXAMPLES},
        )
        result.results.sort(key=lambda item: item.expectation_config.meta["place"])
        report = ContractReport(
            stage=suite["name"],
            expectations=tuple(_plain(item, table[TICKET_ID]) for item in result.results),
            parameters=parameters,
            suite=suite,
            broken_rows=_take_broken_rows(result.results),
        )
        if folder is None:
            return report
        from data_contracts.pages import write_page

        page = f"{DOCS_FOLDER}/{suite['name']}.html"
        write_page(result, report, folder / page, heading)
    return replace(report, page=page)


def check_suite(suite: dict, known: set[str], thresholds: dict[str, float]) -> None:
    """Make sure that a suite can run, long before its table is there.

    Args:
        suite: From `suites.read_suite`.
        known: Names of thresholds and figures that its ``$PARAMETER``s may use.
        thresholds: Values of the thresholds.

    Raises:
        SettingsError: It cannot; says which expectation and why.
    """
    check_parameters(suite, known)
    with _quiet_great_expectations():
        build_suite(suite, thresholds)


def build_suite(suite: dict, parameters: dict[str, Any]) -> "ExpectationSuite":
    """Great Expectations' own form of a suite; a description's ``{name}`` is replaced by the threshold.

    Raises:
        SettingsError: An expectation's type is not known, or its arguments do not fit.
    """
    from great_expectations import ExpectationSuite
    from great_expectations.compatibility.pydantic import ValidationError
    from great_expectations.exceptions import ExpectationNotFoundError
    from great_expectations.expectations.registry import get_expectation_impl

    from data_contracts.expectations import ONLY_WARNS, number_words

    words = {name: number_words(value, False) for name, value in parameters.items()}
    made = []
    for place, entry in enumerate(suite["expectations"]):
        severity = entry.get("severity", CRITICAL)
        fields = {"meta": {**entry.get("meta", {}), "title": title(entry), "place": place}, "severity": severity}
        try:
            if entry.get("description"):
                tail = "" if severity == CRITICAL else ONLY_WARNS
                fields["description"] = entry["description"].format_map(words) + tail
            kind = get_expectation_impl(entry["type"])
            made.append(kind(**entry.get("kwargs", {}), **fields))
        except ExpectationNotFoundError:
            raise SettingsError(f"The contract {suite['name']} names {entry['type']!r}, which is not known.") from None
        except (ValidationError, TypeError, KeyError, ValueError, IndexError) as error:
            reason = " ".join(str(error).split())[:200]
            raise SettingsError(
                f"The contract {suite['name']} has arguments that do not fit {entry['type']!r}: {reason}"
            ) from None
    return ExpectationSuite(name=suite["name"], expectations=made)


def arrow_backed(table: pl.DataFrame) -> pd.DataFrame:
    """A pandas frame over Arrow columns: Great Expectations takes no Polars, and no value becomes a Python object."""
    return table.to_pandas(use_pyarrow_extension_array=True)


def _columns(suite: dict, table: pl.DataFrame) -> list[str]:
    """Columns that a suite names: each expectation copies all of them for the rows where its own is not null."""
    used = {text for entry in suite["expectations"] for text in _texts(entry.get("kwargs", {}))}
    return [name for name in table.columns if name in used] or [TICKET_ID]


def _texts(value: Any) -> Iterator[str]:
    """All strings in the values of nested lists and dictionaries."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


@contextmanager
def _quiet_great_expectations() -> Iterator[Any]:
    """The library, imported where a contract runs (it takes seconds), without its warnings and telemetry."""
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import great_expectations as gx

        from data_contracts import agreement, drift, expectations  # noqa: F401, registers ours

        for name in ("great_expectations", "great_expectations.data_context.types.base"):  # which sets itself to INFO
            logging.getLogger(name).setLevel(logging.ERROR)
        yield gx


def _plain(item: "ExpectationValidationResult", ids: pl.Series) -> ExpectationResult:
    """A result in plain values. Unexpected rows come as positions in the table."""
    config, result = item.expectation_config, item.result
    places = [place for place in result.get("partial_unexpected_index_list") or [] if isinstance(place, int)]
    examples = (result.get("details") or {}).get("ids") or [ids[place] for place in places]
    return ExpectationResult(
        name=config.meta["title"],
        kind=config.type,
        passed=bool(item.success),
        severity=str(getattr(config.severity, "value", config.severity)),
        expected=_sentence(config),
        observed=_observed(item),
        unexpected=int(result.get("unexpected_count") or 0),
        example_ids=tuple(examples[:MOST_EXAMPLES]),
    )


def _take_broken_rows(results: "list[ExpectationValidationResult]") -> dict[int, str]:
    """Places of rows that break what stops the run; the long lists leave the results, pages show a few values."""
    broken: dict[int, str] = {}
    for item in results:
        severity = str(getattr(item.expectation_config.severity, "value", item.expectation_config.severity))
        item.result.pop("unexpected_list", None)
        places = item.result.pop("unexpected_index_list", None) or []
        if not item.success and severity == CRITICAL:
            for place in places:
                if isinstance(place, int):
                    broken.setdefault(place, item.expectation_config.meta["title"])
    return broken


def _observed(item: "ExpectationValidationResult") -> str:
    from data_contracts.expectations import number_words

    result, errors = item.result, item.exception_info or {}
    error = errors if "raised_exception" in errors else next(iter(errors.values()), {})
    if error.get("raised_exception"):
        return "an error: " + str(error.get("exception_message"))[:200]
    if result.get("observed_value") is not None:
        return number_words(result["observed_value"], False)
    if result.get("element_count") is None:
        return "nothing"
    wrong = {str(value) for value in result.get("partial_unexpected_list") or []}
    shown = f" ({', '.join(sorted(wrong)[:3])})" if 0 < len(wrong) <= MOST_EXAMPLES else ""
    return f"{result.get('unexpected_count') or 0:,} of {result['element_count']:,} rows break it{shown}"


def _sentence(config: Any) -> str:
    """What an expectation expects, as its page says it, without markup."""
    from great_expectations.expectations.registry import get_renderer_impl
    from great_expectations.render import LegacyRendererType

    if config.description:
        return config.description
    _, render = get_renderer_impl(object_name=config.type, renderer_type=LegacyRendererType.PRESCRIPTIVE)
    parts = [part.string_template for part in render(configuration=config) if hasattr(part, "string_template")]
    return " ".join(Template(part["template"]).safe_substitute(part.get("params") or {}) for part in parts)
