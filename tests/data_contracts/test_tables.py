"""Coverage over any mix of ids, and the derived columns of predictions."""

from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_contracts.tables import DOUBLED, LOST, PREDICTED, QUARANTINED, STRANGE, outcome_table, prediction_table
from ticket_engine.results import decide

ids = st.lists(st.sampled_from(["a", "b", "c", "d", None]), max_size=8)


def outcomes(expected: list, predicted: list, quarantined: list, kind: pl.DataType = pl.String) -> pl.DataFrame:
    made = [pl.Series("ticket_id", values, dtype=kind) for values in (expected, predicted, quarantined)]
    return outcome_table(made[0], made[1].to_frame().with_columns(pl.lit("x").alias("label")), made[2])


@given(ids, ids, ids)
def test_a_run_is_whole_exactly_if_each_input_row_has_one_outcome(expected, predicted, quarantined):
    table = outcomes(expected, predicted, quarantined)
    whole = Counter(expected) == Counter(predicted + quarantined) and max(Counter(predicted).values(), default=0) <= 1
    assert table["outcome"].is_in([PREDICTED, QUARANTINED]).all() == whole
    if whole:
        assert len(table) == len(expected)
    for ticket in {*expected, *predicted, *quarantined}:
        rows = table.filter(pl.col("ticket_id").eq_missing(pl.lit(ticket, pl.String)))
        found = Counter(rows["outcome"])
        had, wanted = (predicted + quarantined).count(ticket), expected.count(ticket)
        assert found[LOST] == max(0, wanted - had)
        assert found[STRANGE] == (0 if wanted else had)
        assert len(rows) == had + found[LOST]
        assert found[PREDICTED] <= 1


@pytest.mark.parametrize(
    ("predicted", "quarantined", "found"),
    [
        ([1, 2, 3], [], [PREDICTED] * 3),
        ([1, 2], [3], [PREDICTED, PREDICTED, QUARANTINED]),
        ([1, 2], [], [PREDICTED, PREDICTED, LOST]),
        ([1, 2, 2], [3], [PREDICTED, PREDICTED, DOUBLED, QUARANTINED]),
        ([1, 2, 3], [3], [PREDICTED] * 3 + [DOUBLED]),
        ([1, 2, 9], [3], [PREDICTED, PREDICTED, STRANGE, QUARANTINED]),
    ],
)
def test_whole_numbers_as_ids_have_the_same_outcomes(predicted, quarantined, found):
    assert outcomes([1, 2, 3], predicted, quarantined, pl.Int64)["outcome"].to_list() == found


def test_an_id_that_the_input_repeats_has_one_prediction_and_the_rest_in_quarantine():
    assert set(outcomes(["a", "a", "a"], ["a"], ["a", "a"])["outcome"]) == {PREDICTED, QUARANTINED}
    assert Counter(outcomes(["a", "a"], ["a", "a"], [])["outcome"]) == {PREDICTED: 1, DOUBLED: 1}


@pytest.mark.parametrize("rows", [0, 5, 40_000])
def test_what_the_engine_writes_is_judged_right_across_chunks(tmp_path: Path, rows: int):
    labels = ("yes", "^no$", "*")
    scores = np.random.default_rng(0).normal(scale=4, size=(rows, 3))
    log_probs = (scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)).astype(np.float32)
    frame = pl.DataFrame({"^id$": np.arange(rows)}).hstack(decide(log_probs, labels))
    frame.write_parquet(tmp_path / "predictions.parquet")
    table = prediction_table(tmp_path / "predictions.parquet", "^id$")
    assert table["ticket_id"].to_list() == list(range(rows))
    assert table["label"].equals(frame["label"])
    assert table["fits_scores"].eq_missing(pl.Series(["yes"])).all()
    assert (table["probability_sum"] - 1).abs().max() in (None, pytest.approx(0, abs=1e-6))
    if rows > 5:
        last = rows - 1
        at_last = pl.int_range(pl.len()) == last
        frame.with_columns(
            pl.when(at_last).then(pl.lit(1.0, pl.Float32)).otherwise("margin").alias("margin")
        ).write_parquet(tmp_path / "predictions.parquet")
        table = prediction_table(tmp_path / "predictions.parquet", "^id$")
        assert table.filter(pl.col("fits_scores") != "yes").select("ticket_id", "fits_scores").rows() == [
            (last, "margin")
        ]
