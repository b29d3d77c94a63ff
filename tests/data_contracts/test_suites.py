"""Suite files: what is wrong with one is told in a line before anything runs; teams add to them without Python."""

import json
import re
import warnings
from pathlib import Path

import pytest

from data_contracts.checks import check_predictions, check_tickets
from data_contracts.reports import ContractReport
from data_contracts.suites import check_parameters, read_suite, read_thresholds
from ticket_engine.errors import SettingsError

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "contracts.md"


@pytest.mark.parametrize("name", ["tickets", "predictions"])
def test_the_shipped_suites_are_suites_of_great_expectations(name):
    suite = read_suite(ROOT / "data_contracts" / f"{name}.json")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from great_expectations import ExpectationSuite

        from data_contracts import agreement, drift, expectations  # noqa: F401

        made = ExpectationSuite(**suite)
    assert made.name == name
    assert [item.expectation_type for item in made.expectations] == [entry["type"] for entry in suite["expectations"]]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "is not JSON"),
        ("[]", "it has no name"),
        ('{"name": "x", "meta": {}, "expectations": []}', "it has no expectations"),
        ('{"name": "x", "meta": {"parameters": {"a": "1"}}, "expectations": [{"type": "t"}]}', "a is not a number"),
        ('{"name": "x", "meta": {"parameters": {"a": true}}, "expectations": [{"type": "t"}]}', "a is not a number"),
        ('{"name": "x", "meta": {}, "expectations": [{"kwargs": {}}]}', "expectation 1 has no type"),
        (
            '{"name": "x", "meta": {}, "expectations": [{"type": "t", "severity": "bad"}]}',
            "not critical, warning or info",
        ),
        ('{"name": "x", "meta": {}, "expectations": [{"type": "t", "kwargs": 3}]}', "kwargs or meta of expectation 1"),
    ],
)
def test_a_file_that_is_no_suite_is_told_in_one_line(tmp_path, content, told):
    path = tmp_path / "suite.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(SettingsError, match=re.escape(told)) as error:
        read_suite(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_suite_is_a_settings_error(tmp_path):
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        read_suite(tmp_path / "none.json")


def test_thresholds_are_those_of_both_suites_with_the_overrides():
    suites = [{"meta": {"parameters": {"a": 1, "b": 2}}}, {"meta": {"parameters": {"c": 3}}}, {"meta": {}}]
    assert read_thresholds(suites, {"b": 0.5}) == {"a": 1, "b": 0.5, "c": 3}


def test_a_parameter_deep_in_the_arguments_is_found():
    entry = {"type": "t", "kwargs": {"value_set": [{"deep": {"$PARAMETER": "unheard_of"}}]}}
    with pytest.raises(SettingsError, match="'unheard_of' in 't'"):
        check_parameters({"name": "x", "expectations": [entry]}, {"a"})


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"type": "expect_the_moon"}, "'expect_the_moon', which is not known"),
        ({"type": "expect_column_values_to_be_between", "kwargs": {"colum": "margin"}}, "do not fit"),
        ({"type": "expect_column_values_to_be_unique", "kwargs": {"column": "label"}, "description": "{nil}"}, "nil"),
    ],
)
def test_an_expectation_that_cannot_run_is_told_before_the_model_runs(finished_run, tmp_path, entry, told):
    suite = read_suite(ROOT / "data_contracts" / "predictions.json")
    suite["expectations"].append(entry)
    path = tmp_path / "suite.json"
    path.write_text(json.dumps(suite), encoding="utf-8")
    run = finished_run(rows=10).with_settings(predictions_contract=str(path))
    with pytest.raises(SettingsError, match=told) as error:
        check_tickets(run.folder, run.settings, run.summary)
    assert "\n" not in str(error.value)


def guide_example(kind: str) -> dict:
    """The example of an expectation in docs/contracts.md."""
    blocks = re.findall(r"```json\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    return next(entry for entry in map(json.loads, blocks) if entry["type"] == kind)


def test_the_guide_names_every_threshold_with_its_default():
    guide = GUIDE.read_text(encoding="utf-8")
    for name in ("tickets", "predictions"):
        for threshold, value in read_suite(ROOT / "data_contracts" / f"{name}.json")["meta"]["parameters"].items():
            (row,) = [line for line in guide.splitlines() if line.startswith("|") and f"`{threshold}`" in line]
            assert f"{value:,g}" in row or f"{value:,}" in row


def test_columns_that_a_team_relies_on_are_required_as_the_guide_shows(finished_run, tmp_path):
    suite = read_suite(ROOT / "data_contracts" / "tickets.json")
    suite["expectations"][0] = guide_example("expect_input_columns_to_have_types")
    path = tmp_path / "suite.json"
    path.write_text(json.dumps(suite), encoding="utf-8")
    run = finished_run().with_settings(tickets_contract=str(path))
    report = check_tickets(run.folder, run.settings, run.summary)
    assert [(item.name, item.observed) for item in report.failed] == [("columns and types", "channel is missing")]


def test_an_expectation_added_as_the_guide_shows_runs_and_is_shown(finished_run, tmp_path):
    example = guide_example("expect_column_mean_to_be_between")
    suite = read_suite(ROOT / "data_contracts" / "predictions.json")
    suite["meta"]["parameters"] |= {"min_mean_probability": 0.99}
    suite["expectations"].append(example)
    path = tmp_path / "suite.json"
    path.write_text(json.dumps(suite), encoding="utf-8")
    run = finished_run().with_settings(predictions_contract=str(path))
    incoming = ContractReport("tickets", ())
    report = check_predictions(run.folder, run.settings, run.checked, incoming, run.summary.rows)
    assert report.passed
    (item,) = report.warnings
    assert item.kind == example["type"]
    assert float(item.observed) == pytest.approx(run.predictions()["probability"].mean(), rel=1e-3)
    assert "at least 0.99" in item.expected
    assert item.expected.endswith("only warns.")
    page = (run.folder / "data_docs" / "predictions.html").read_text(encoding="utf-8")
    assert item.expected in page
    lower = run.with_settings(contract_parameters={"min_mean_probability": 0.01})
    assert not check_predictions(run.folder, lower.settings, run.checked, incoming, run.summary.rows).warnings
