"""Each expectation of both contracts is broken alone, on real tickets, and exactly it is reported."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from data_contracts.checks import check_predictions, check_tickets
from data_contracts.reports import ContractReport
from data_contracts.suites import read_suite
from ticket_engine.errors import SettingsError
from ticket_engine.schemas import LOG_PROBS
from ticket_engine.spot_check import compare
from ticket_engine.spot_sample import choose_sample

ROOT = Path(__file__).parents[2]
INCOMING = ContractReport("tickets", ())


def failed(report: ContractReport) -> list[str]:
    return [item.name for item in report.expectations if not item.passed]


def outgoing(run) -> ContractReport:
    return check_predictions(run.folder, run.settings, run.checked, INCOMING, run.summary.rows)


def change(frame: pl.DataFrame, row: int, **values: object) -> pl.DataFrame:
    """The frame with other values in one row."""
    here = pl.int_range(pl.len()) == row
    return frame.with_columns(
        pl.when(here).then(pl.lit(value, frame.schema[name])).otherwise(name).alias(name)
        for name, value in values.items()
    )


def change_score(frame: pl.DataFrame, row: int, value: float) -> pl.DataFrame:
    """The frame with another first log-probability in one row."""
    scores = frame[LOG_PROBS].to_list()
    first = next(iter(scores[row]))
    scores[row] = scores[row] | {first: value}
    return frame.with_columns(pl.Series(LOG_PROBS, scores, dtype=frame.schema[LOG_PROBS]))


def test_a_good_run_with_quarantined_rows_passes_both_contracts(finished_run):
    run = finished_run(bad_rows=3)
    incoming = check_tickets(run.folder, run.settings, run.summary)
    report = check_predictions(run.folder, run.settings, run.checked, incoming, run.summary.rows)
    assert failed(incoming) == failed(report) == []
    assert incoming.parameters["quarantined"] == report.parameters["quarantined"] == 5
    assert json.loads(json.dumps(report.summary()))["passed"] is True


def test_an_empty_table_passes_both_contracts_where_no_row_is_asked_for(finished_run):
    run = finished_run(rows=0)
    assert failed(check_tickets(run.folder, run.settings, run.summary)) == ["row count"]
    run = run.with_settings(contract_parameters={"min_rows": 0})
    incoming = check_tickets(run.folder, run.settings, run.summary)
    report = check_predictions(run.folder, run.settings, run.checked, incoming, 0)
    assert failed(incoming) == failed(report) == []
    assert (run.folder / "data_docs" / "index.html").is_file()


@pytest.mark.parametrize(
    "name",
    [
        "banking77",
        "banking77_coarse",
        "bitext_support_coarse",
        "cfpb_complaints",
        "cfpb_zeroshot_bench",
        "clinc150_domains",
        "it_tickets",
        "it_tickets_nosubject",
        "kaggle_random_labels",
        "multidogo_chats",
        "stackexchange_meta",
        "xsid_multilingual",
    ],
)
def test_every_set_of_real_tickets_passes_the_contracts_as_shipped(finished_run, name):
    run = finished_run(name)
    incoming = check_tickets(run.folder, run.settings, run.summary)
    assert failed(incoming) == []
    assert failed(outgoing(run)) == []


BROKEN_PREDICTIONS: dict[str, tuple[Callable, str, str]] = {
    "a lost row": (lambda frame: frame.filter(pl.int_range(pl.len()) != 7), "coverage", "lost"),
    "a doubled row": (lambda frame: pl.concat([frame, frame[7]]), "coverage", "doubled"),
    "a row that the input has not": (
        lambda frame: change(frame, 7, ticket_id="nobody"),
        "coverage",
        "lost, not in the input",
    ),
    "a label outside the set": (lambda frame: change(frame, 7, label="weather"), "known labels", "weather"),
    "no label": (lambda frame: change(frame, 7, label=None), "known labels", "(none)"),
    "a score that is not a number": (lambda frame: change_score(frame, 7, float("nan")), "scores", "1 of"),
    "an infinite score": (lambda frame: change_score(frame, 7, float("-inf")), "scores", "1 of"),
    "a missing score": (lambda frame: change_score(frame, 7, None), "scores", "1 of"),
    "scores that sum to more than 1": (lambda frame: change_score(frame, 7, 0.0), "scores", "1 of"),
    "a probability above 1": (lambda frame: change(frame, 7, probability=1.7), "probability range", "1.7"),
    "a probability that is not a number": (
        lambda frame: change(frame, 7, probability=float("nan")),
        "probability range",
        "1 of",
    ),
    "no probability": (lambda frame: change(frame, 7, probability=None), "probability range", "1 of"),
    "a negative margin": (lambda frame: change(frame, 7, margin=-0.25), "margin range", "-0.25"),
    "a margin of another ticket": (lambda frame: change(frame, 7, margin=0.99), "label fits scores", "margin"),
    "a probability of another ticket": (
        lambda frame: change(frame, 7, probability=0.01),
        "label fits scores",
        "probability",
    ),
}


@pytest.mark.parametrize("fault", BROKEN_PREDICTIONS)
def test_a_fault_in_one_prediction_breaks_exactly_its_expectation(finished_run, fault):
    run = finished_run()
    damage, name, found = BROKEN_PREDICTIONS[fault]
    whole = run.predictions()
    report = outgoing(run.with_predictions(damage(whole)))
    assert failed(report) == [name]
    (item,) = report.failed
    assert found in item.observed
    known = {whole["ticket_id"][7], "nobody"}
    assert item.example_ids
    assert set(item.example_ids) <= known


def test_a_label_that_is_not_the_likeliest_breaks_exactly_its_expectation(finished_run):
    run = finished_run()
    frame = run.predictions()
    other = next(label for label in frame[LOG_PROBS].struct.fields if label != frame["label"][7])
    report = outgoing(run.with_predictions(change(frame, 7, label=other)))
    assert failed(report) == ["label fits scores"]
    assert report.failed[0].example_ids == (frame["ticket_id"][7],)


def test_several_faults_are_reported_together_also_in_the_first_rows(finished_run):
    run = finished_run()
    frame = change(change(run.predictions(), 0, label="weather"), 1, margin=2.0)
    report = outgoing(run.with_predictions(frame[:-1]))
    assert failed(report) == ["coverage", "known labels", "margin range"]
    assert [item.example_ids for item in report.failed[1:]] == [(frame["ticket_id"][0],), (frame["ticket_id"][1],)]


def test_a_row_lost_from_quarantine_breaks_coverage(finished_run):
    run = finished_run(bad_rows=3)
    quarantine = run.quarantine()
    quarantine[1:].write_parquet(run.folder / "quarantine.parquet")
    report = outgoing(run)
    assert failed(report) == ["coverage"]
    assert report.failed[0].example_ids == (quarantine["ticket_id"][0],)


def test_a_ticket_both_predicted_and_in_quarantine_breaks_coverage(finished_run):
    run = finished_run(bad_rows=3)
    quarantine, predicted = run.quarantine(), run.predictions()["ticket_id"][0]
    pl.concat([quarantine, change(quarantine[:1], 0, ticket_id=predicted)]).write_parquet(
        run.folder / "quarantine.parquet"
    )
    report = outgoing(run)
    assert failed(report) == ["coverage"]
    assert report.failed[0].example_ids == (predicted,)


def test_sampled_tickets_with_another_label_break_exactly_agreement(finished_run, reference_answers):
    run = finished_run()
    sample = choose_sample(run.predictions(), 32, 0)
    checked = compare(reference_answers(sample, wrong=[4]), 1e-4, 0)
    report = outgoing(replace(run, checked=checked))
    assert failed(report) == ["agreement"]
    assert report.failed[0].example_ids == (sample["ticket_id"][4],)
    assert f"{len(sample) - 1} of {len(sample)}" in report.failed[0].observed


def test_one_wrong_bucket_breaks_agreement_where_the_whole_share_is_above_the_limit(finished_run, reference_answers):
    run = finished_run()
    predictions = run.predictions().with_columns(
        pl.when(pl.int_range(pl.len()) < 3).then(99).otherwise("bucket_index").cast(pl.UInt32).alias("bucket_index")
    )
    sample = choose_sample(predictions, 600, 0)
    wrong = [row for row, bucket in enumerate(sample["bucket_index"]) if bucket == 99]
    checked = compare(reference_answers(sample, wrong=wrong), 1e-4, 0)
    assert checked.agreement > run.settings.min_agreement
    assert failed(outgoing(replace(run, checked=checked))) == ["agreement"]


def test_a_sample_of_none_measures_no_agreement_and_passes(finished_run, reference_answers):
    run = finished_run()
    checked = compare(reference_answers(choose_sample(run.predictions(), 0, 0)), 1e-4, 0)
    report = outgoing(replace(run, checked=checked))
    assert report.passed
    assert "no ticket was scored again" in [item.observed for item in report.expectations]


def test_a_label_above_the_allowed_share_breaks_exactly_its_expectation(finished_run):
    run = finished_run().with_settings(contract_parameters={"max_label_share": 0.1})
    report = outgoing(run)
    assert failed(report) == ["largest label share"]
    largest = max(report.parameters["label_counts"].values()) / report.parameters["predictions"]
    assert report.failed[0].observed == f"{100 * largest:.2f} %"


def test_a_small_table_is_not_judged_by_shares(finished_run):
    run = finished_run(rows=40).with_settings(contract_parameters={"max_label_share": 0.01})
    assert outgoing(run).passed


def test_drift_against_the_last_published_run_warns_or_fails_by_setting(finished_run, publish_before):
    run = finished_run().with_settings(contract_parameters={"max_drift": 0.3})
    labels = run.predictions()[LOG_PROBS].struct.fields
    publish_before(run, dict.fromkeys(labels, 0) | {labels[0]: 500})
    report = outgoing(run)
    assert [item.name for item in report.warnings] == failed(report) == ["label drift"]
    assert report.passed
    share = report.parameters["label_counts"][labels[0]] / report.parameters["predictions"]
    assert f"{100 - 100 * share:.2f} %" in report.warnings[0].observed
    report = outgoing(run.with_settings(on_drift="fail"))
    assert [item.name for item in report.failed] == failed(report) == ["label drift"]


def test_equal_label_shares_are_no_drift_whatever_the_number_of_tickets(finished_run, publish_before):
    run = finished_run().with_settings(contract_parameters={"max_drift": 0.0}, on_drift="fail")
    publish_before(run, {label: 3 * count for label, count in outgoing(run).parameters["label_counts"].items()})
    assert outgoing(run).passed


def test_a_first_run_has_no_drift(finished_run):
    report = outgoing(finished_run().with_settings(contract_parameters={"max_drift": 0.0}, on_drift="fail"))
    assert report.passed
    assert "no earlier run" in report.expectations[-1].observed


def rewrite(path: Path, change: Callable[[pl.DataFrame], pl.DataFrame]) -> None:
    change(pl.read_parquet(path)).write_parquet(path)


def test_repeated_ids_break_exactly_their_expectation(finished_run):
    run = finished_run()
    rewrite(run.folder / "tickets.parquet", lambda frame: change(frame, 3, ticket_id=frame["ticket_id"][9]))
    report = check_tickets(run.folder, run.settings, run.summary)
    assert failed(report) == ["ids are unique"]
    assert set(report.failed[0].example_ids) == {pl.read_parquet(run.folder / "tickets.parquet")["ticket_id"][9]}


def test_null_ids_break_exactly_their_expectation(finished_run):
    run = finished_run()
    rewrite(run.folder / "tickets.parquet", lambda frame: change(frame, 3, ticket_id=None))
    report = check_tickets(run.folder, run.settings, run.summary)
    assert failed(report) == ["ids are not null"]
    assert report.failed[0].example_ids == (None,)


def test_a_ticket_without_text_breaks_exactly_its_expectation(finished_run):
    run = finished_run()
    rewrite(run.folder / "tickets.parquet", lambda frame: change(frame, 3, text=""))
    report = check_tickets(run.folder, run.settings, run.summary)
    assert failed(report) == ["text is present"]


def test_a_column_of_another_type_than_a_team_asks_for_breaks_exactly_its_expectation(finished_run, own_suite):
    path = own_suite("tickets", {"columns and types": {"required": {"ticket_id": ["Int64"], "channel": ["String"]}}})
    run = finished_run().with_settings(tickets_contract=str(path))
    report = check_tickets(run.folder, run.settings, run.summary)
    assert failed(report) == ["columns and types"]
    assert report.failed[0].observed == "channel is missing; ticket_id is String"


BROKEN_THRESHOLDS = {
    "row count": ({"min_rows": 5000}, "1,520"),
    "quarantine rate": ({"max_quarantine_rate": 0.003}, "0.33 %"),
    "text lengths": ({"min_median_characters": 5000}, ""),
    "text lengths not collapsed": ({"max_same_length_rate": 0.001}, " %"),
}


@pytest.mark.parametrize("name", BROKEN_THRESHOLDS)
def test_a_threshold_of_the_deployment_breaks_exactly_its_expectation(finished_run, name):
    parameters, found = BROKEN_THRESHOLDS[name]
    run = finished_run(bad_rows=3).with_settings(contract_parameters=parameters)
    report = check_tickets(run.folder, run.settings, run.summary)
    assert failed(report) == [name]
    assert found in report.failed[0].observed
    assert "characters" not in report.failed[0].observed


def test_too_many_truncated_tickets_break_exactly_their_expectation(finished_run):
    run = finished_run("cfpb_complaints").with_settings(contract_parameters={"max_truncated_rate": 0.1})
    report = check_tickets(run.folder, run.settings, run.summary)
    assert failed(report) == ["truncated rate"]


def test_texts_cut_to_one_length_by_a_broken_export_break_exactly_their_expectation(finished_run):
    run = finished_run()
    rewrite(run.folder / "tickets.parquet", lambda frame: frame.with_columns(pl.col("text").str.slice(0, 16)))
    report = check_tickets(run.folder, run.settings, run.summary)
    assert failed(report) == ["text lengths not collapsed"]


def test_an_override_that_no_contract_has_is_a_settings_error(finished_run):
    run = finished_run(rows=10).with_settings(contract_parameters={"max_quarantene_rate": 0.1})
    with pytest.raises(
        SettingsError, match=r"No contract has a parameter 'max_quarantene_rate'.*max_quarantine_rate"
    ) as error:
        check_tickets(run.folder, run.settings, run.summary)
    assert "\n" not in str(error.value)


def test_a_fault_in_the_output_suite_shows_before_the_model_runs(finished_run, own_suite):
    path = own_suite("predictions", {"largest label share": {"max_value": {"$PARAMETER": "max_share"}}})
    run = finished_run(rows=10).with_settings(predictions_contract=str(path))
    with pytest.raises(SettingsError, match="'max_share' in 'largest label share'"):
        check_tickets(run.folder, run.settings, run.summary)


def lose_rows(run, name: str, rows: int) -> None:
    """What a fault of the reader or of a later stage would do to a file of the run."""
    frame = pl.read_parquet(run.folder / name)
    frame.head(len(frame) - rows).write_parquet(run.folder / name)


def test_rows_lost_while_reading_break_both_contracts_though_no_file_of_the_run_knows_them(finished_run):
    run = finished_run(rows=40)
    lost = pl.read_parquet(run.folder / "tickets.parquet")["ticket_id"].tail(5)
    lose_rows(run, "tickets.parquet", 5)
    lose_rows(run, "tokens.parquet", 5)
    predictions = run.predictions()
    run.with_predictions(predictions.filter(~pl.col("ticket_id").is_in(lost.implode())))
    incoming = check_tickets(run.folder, run.settings, run.summary)
    assert failed(incoming) == ["every row was read"]
    report = check_predictions(run.folder, run.settings, run.checked, incoming, run.summary.rows)
    assert failed(report) == ["coverage"]
    coverage = report.expectations[0]
    assert coverage.unexpected == 5
    assert "5 of 40" in coverage.observed


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"type": "expect_column_values_to_be_between", "kwargs": {"column": "characters", "max_value": 60}}, "short"),
        ({"parameters": {"max_truncated_rate": 0.0, "min_rows_for_shares": 1}}, "truncated rate"),
        ({"parameters": {"max_same_length_rate": 0.0, "min_rows_for_shares": 1}}, "text lengths not collapsed"),
    ],
)
def test_a_refused_table_has_the_rows_that_it_was_refused_for_in_its_quarantine(finished_run, tmp_path, change, name):
    run = finished_run("cfpb_complaints")
    if "type" in change:
        suite = read_suite(ROOT / "data_contracts" / "tickets.json")
        suite["expectations"].append(change | {"meta": {"title": name}})
        (tmp_path / "own.json").write_text(json.dumps(suite), encoding="utf-8")
        run = run.with_settings(tickets_contract=str(tmp_path / "own.json"))
    else:
        run = run.with_settings(contract_parameters=change["parameters"])
    before = run.quarantine()
    report = check_tickets(run.folder, run.settings, run.summary)
    assert failed(report) == [name]
    added = run.quarantine().filter(pl.col("reason") == f"refused: {name}")
    assert len(run.quarantine()) == len(added) + len(before.filter(pl.col("reason") == "no text"))
    table = pl.read_parquet(run.folder / "tickets.parquet")
    lengths = table["text"].str.len_chars()
    expected = {
        "short": table.filter(lengths > 60),
        "truncated rate": table.join(
            pl.read_parquet(run.folder / "tokens.parquet").filter("is_truncated"), on="ticket_id", how="semi"
        ),
        "text lengths not collapsed": table.filter(lengths == lengths.mode().min()),
    }[name]
    assert 0 < len(added) == len(expected)
    assert set(added["ticket_id"]) == set(expected["ticket_id"])
    assert added["body"].null_count() == 0


def test_an_edit_of_suite_or_labels_while_a_run_goes_on_changes_nothing_that_it_is_judged_by(finished_run, tmp_path):
    run = finished_run(rows=200)
    suite = tmp_path / "own.json"
    shutil.copyfile(ROOT / "data_contracts" / "predictions.json", suite)
    labels = tmp_path / "labels.yaml"
    shutil.copyfile(run.settings.labels, labels)
    run = run.with_settings(predictions_contract=str(suite), labels=str(labels))
    incoming = check_tickets(run.folder, run.settings, run.summary)
    suite.write_text("{")
    labels.unlink()
    report = check_predictions(run.folder, run.settings, run.checked, incoming, run.summary.rows)
    assert report.passed
    assert len(report.expectations) == 9


def moved(sample: pl.DataFrame, rows: int, probability: float, theirs: float, *, swap: bool = False) -> pl.DataFrame:
    """A sample whose first rows have two likely labels of these probabilities, the reference's others, or swapped."""
    labels = [field.name for field in sample.schema[LOG_PROBS].fields]
    rest = 1e-6

    def scores(first: float, flip: bool) -> list[float]:
        pair = (1 - first, first) if flip else (first, 1 - first)
        values = np.array([*pair, *[rest] * (len(labels) - 2)])
        return np.log(values / values.sum()).tolist()

    picked = pl.int_range(pl.len()) < rows
    mine, other = scores(probability, False), scores(theirs, swap)
    frame = sample.with_columns(
        pl.when(picked).then(pl.lit(labels[0])).otherwise("label").alias("label"),
        pl.when(picked)
        .then(pl.struct(**{name: pl.lit(value, pl.Float32) for name, value in zip(labels, mine, strict=True)}))
        .otherwise(LOG_PROBS)
        .alias(LOG_PROBS),
    )
    own = [list(values.values()) for values in sample[LOG_PROBS].to_list()]
    reference = [other if row < rows else values for row, values in enumerate(own)]
    names = [labels[int(np.argmax(values))] for values in reference]
    return frame.with_columns(
        pl.Series("reference_label", names, dtype=pl.String),
        pl.Series("reference_log_probs", reference, dtype=pl.List(pl.Float32)),
    )


def broken_limits(run, scored: pl.DataFrame, tolerance: float) -> str:
    """What the agreement found, if it fails; empty if it holds."""
    report = outgoing(replace(run, checked=compare(scored, tolerance, 0)))
    return "".join(item.observed for item in report.expectations if item.name == "agreement" and not item.passed)


@pytest.mark.parametrize("tolerance", [1e-4, 0.25])
def test_probabilities_are_judged_and_not_labels_alone(finished_run, tolerance):
    run = finished_run()
    sample = choose_sample(run.predictions(), 32, 0)
    assert broken_limits(run, moved(sample, 1, 0.95, 0.95), tolerance) == ""
    found = broken_limits(run, moved(sample, 1, 0.95, 0.55), tolerance)  # the same label: agreement was 1.0
    assert found.endswith("broken: max_difference")
    assert ("broken" in broken_limits(run, moved(sample, 1, 0.95, 0.93), tolerance)) is (tolerance < 0.01)


def test_many_near_ties_are_no_rounding(finished_run):
    """40 of 40 other labels at .56 and .44 once were near-ties, agreement 1.0."""
    run = finished_run()
    sample = choose_sample(run.predictions(), 32, 0)
    assert broken_limits(run, moved(sample, 4, 0.56, 0.56, swap=True), 0.25) == ""
    found = broken_limits(run, moved(sample, 40, 0.56, 0.56, swap=True), 0.25)
    assert "40 were near-ties" in found
    assert found.endswith("broken: max_near_tie_rate")


def test_what_words_alone_decided_is_not_judged_by_the_rounding_of_the_model(finished_run):
    run = finished_run()
    sample = choose_sample(run.predictions(), 32, 0)
    scored = moved(sample, 1, 0.862, 0.95)
    for stage, broken in ((0, True), (3, False)):
        staged = scored.with_columns(pl.lit(stage, pl.Int16).alias("stage"))
        assert ("decided by their text" in broken_limits(run, staged, 0.25)) is broken
