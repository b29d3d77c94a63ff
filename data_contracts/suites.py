"""Expectation suites: read from JSON, run by Great Expectations, reported in plain values."""

import importlib
import json
import logging
import math
import os
import warnings
from pathlib import Path
from typing import Any

import pandas as pd

from data_contracts.pages import make_self_contained
from data_contracts.reports import DOCS_FOLDER, ContractReport, ExpectationResult
from ticket_engine.errors import SettingsError

MOST_EXAMPLES = 20


def read_suite(path: str | Path) -> dict:
    """A suite file: ``name``, ``meta.parameters`` (thresholds with their defaults) and ``expectations``.

    Raises:
        SettingsError: The file is missing or not such a suite.
    """
    try:
        suite = json.loads(Path(path).read_text(encoding="utf-8"))
        suite["name"], suite["meta"]["parameters"], suite["expectations"][0]["type"]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise SettingsError(
            f"The contract {path} is not usable ({type(error).__name__}: {error}). "
            "It needs name, meta.parameters and expectations; see docs/contracts.md."
        ) from error
    return suite


def thresholds(suites: list[dict], overrides: dict[str, float]) -> dict[str, float]:
    """The thresholds of suites with a run's overrides.

    Raises:
        SettingsError: An override names no threshold of these suites.
    """
    known = {name: value for suite in suites for name, value in suite["meta"]["parameters"].items()}
    unknown = sorted(set(overrides) - set(known))
    if unknown:
        raise SettingsError(f"No contract has a parameter {unknown[0]!r}. Known: {', '.join(sorted(known))}.")
    return known | overrides


def run_suite(
    suite: dict, frame: pd.DataFrame, parameters: dict[str, Any], id_column: str, folder: Path
) -> ContractReport:
    """Run a suite over a frame and write its pages to ``folder / "data_docs" / name``.

    Args:
        suite: From `read_suite`.
        frame: One row a ticket or input row; no ticket text.
        parameters: Values of the suite's ``$PARAMETER``s.
        id_column: Its values are given as examples of rows that break an expectation.
        folder: The run's working folder.
    """
    gx = _great_expectations()
    from great_expectations.expectations.registry import get_expectation_impl

    name = suite["name"]
    expectations = [
        get_expectation_impl(entry["type"])(
            **entry["kwargs"], meta=entry.get("meta", {}), severity=entry.get("severity", "critical")
        )
        for entry in suite["expectations"]
    ]
    pages = folder / DOCS_FOLDER / name
    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    context.add_data_docs_site(site_name="pages", site_config=_site(pages))
    batch = context.data_sources.add_pandas("run").add_dataframe_asset(name).add_batch_definition_whole_dataframe("all")
    made = context.suites.add(gx.ExpectationSuite(name=name, expectations=expectations))
    definition = context.validation_definitions.add(gx.ValidationDefinition(name=name, data=batch, suite=made))
    checkpoint = context.checkpoints.add(
        gx.Checkpoint(
            name=name,
            validation_definitions=[definition],
            actions=[gx.checkpoint.UpdateDataDocsAction(name="pages", site_names=["pages"])],
            result_format={"result_format": "SUMMARY", "unexpected_index_column_names": [id_column]},
        )
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = checkpoint.run(batch_parameters={"dataframe": frame}, expectation_parameters=parameters)
    make_self_contained(pages)
    (result,) = outcome.run_results.values()
    return ContractReport(name, tuple(_plain(item, id_column) for item in result.results))


def _great_expectations():
    """The library, imported where a contract runs: it takes seconds."""
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import great_expectations as gx

        importlib.import_module("data_contracts.expectations")  # registers ours

    logging.getLogger("great_expectations").setLevel(logging.ERROR)
    return gx


def _site(pages: Path) -> dict:
    return {
        "class_name": "SiteBuilder",
        "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
        "store_backend": {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(pages.resolve())},
        "show_how_to_buttons": False,
    }


def _plain(item: Any, id_column: str) -> ExpectationResult:
    config, result = item.expectation_config, item.result
    examples = [row[id_column] for row in result.get("partial_unexpected_index_list") or [] if id_column in row]
    unexpected = int(result.get("unexpected_count") or 0)
    observed = result.get("observed_value")
    if (item.exception_info or {}).get("raised_exception"):
        text = "an error: " + str(item.exception_info.get("exception_message"))[:200]
    elif observed is not None:
        text = f"{observed:.4g}" if isinstance(observed, float) and not math.isnan(observed) else str(observed)
    else:
        text = f"{unexpected} of {result.get('element_count', 0)} rows that break it"
    return ExpectationResult(
        name=config.meta.get("title") or config.type,
        passed=bool(item.success),
        severity=str(getattr(config.severity, "value", config.severity) or "critical"),
        observed=text,
        unexpected=unexpected,
        example_ids=tuple(_value(example) for example in examples[:MOST_EXAMPLES]),
    )


def _value(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
