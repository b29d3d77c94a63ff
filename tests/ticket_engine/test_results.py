from pathlib import Path

import numpy as np
import polars as pl
import pytest
from polars.exceptions import PolarsError

from ticket_engine.errors import ScoringError
from ticket_engine.results import bucket_of_tickets, decide, gather_predictions, summarise
from ticket_engine.schemas import predictions_schema

LABELS = ("billing", "delivery", "returns")


def log_probs(*probabilities: tuple[float, ...]) -> np.ndarray:
    return np.log(np.array(probabilities, dtype=np.float32).reshape(-1, len(LABELS)))


def tokens(keys: list[bytes], indexes: list[int] | None = None) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "number": [100 + index for index in range(len(keys))],
            "input_index": indexes if indexes is not None else list(range(len(keys))),
            "ticket_key": keys,
            "token_length": [5] * len(keys),
            "is_truncated": [False] * len(keys),
        },
        schema={
            "number": pl.Int32,
            "input_index": pl.UInt32,
            "ticket_key": pl.Binary,
            "token_length": pl.UInt32,
            "is_truncated": pl.Boolean,
        },
    )


def scores(keys: list[bytes], matrix: np.ndarray, reasons: list[str | None] | None = None) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "ticket_key": keys,
            "log_probs": matrix.tolist(),
            "stage": [row % 3 for row in range(len(keys))],
            "reason": reasons or [None] * len(keys),
        },
        schema={"ticket_key": pl.Binary, "log_probs": pl.List(pl.Float32), "stage": pl.Int16, "reason": pl.String},
    )


def buckets(keys: list[bytes], index: int = 0) -> pl.DataFrame:
    return pl.DataFrame(
        {"ticket_key": keys, "bucket_index": [index] * len(keys)},
        schema={"ticket_key": pl.Binary, "bucket_index": pl.UInt32},
    )


def test_the_most_likely_label_wins_with_its_probability_and_its_lead_over_the_second() -> None:
    made = decide(log_probs((0.2, 0.7, 0.1), (0.5, 0.1, 0.4)), LABELS)
    assert made["label"].to_list() == ["delivery", "billing"]
    np.testing.assert_allclose(made["probability"], [0.7, 0.5], rtol=1e-6)
    np.testing.assert_allclose(made["margin"], [0.5, 0.1], rtol=1e-5)
    struct = made["log_probs"].struct.unnest()
    assert struct.columns == list(LABELS)
    np.testing.assert_allclose(np.exp(struct.to_numpy()), [[0.2, 0.7, 0.1], [0.5, 0.1, 0.4]], rtol=1e-6)
    np.testing.assert_allclose(np.exp(struct.to_numpy()).sum(1), 1, rtol=1e-6)


def test_of_equally_likely_labels_the_first_wins_with_no_margin() -> None:
    made = decide(log_probs((0.2, 0.4, 0.4)), LABELS)
    assert (made["label"][0], made["margin"][0]) == ("delivery", 0.0)


def test_predictions_stand_in_input_order_with_the_types_of_the_schema() -> None:
    keys = [b"a", b"b", b"c"]
    made, failed = gather_predictions(
        tokens(keys, [7, 2, 5]),
        scores([b"c", b"a", b"b"], log_probs((0.1, 0.1, 0.8), (0.8, 0.1, 0.1), (0.1, 0.8, 0.1))),
        buckets([b"a", b"c"], 3),
        LABELS,
    )
    assert made["number"].to_list() == [101, 102, 100]
    assert made["label"].to_list() == ["delivery", "returns", "billing"]
    assert made["bucket_index"].to_list() == [None, 3, 3]
    assert made.schema == predictions_schema("number", pl.Int32(), LABELS)
    assert len(failed) == 0


def test_equal_texts_share_one_score() -> None:
    made, _ = gather_predictions(
        tokens([b"a", b"b", b"a"]),
        scores([b"a", b"b"], log_probs((0.8, 0.1, 0.1), (0.1, 0.8, 0.1))),
        buckets([b"a", b"b"]),
        LABELS,
    )
    assert made["label"].to_list() == ["billing", "delivery", "billing"]
    assert made["log_probs"][0] == made["log_probs"][2]


def test_tickets_that_could_not_be_scored_are_apart_with_their_reason() -> None:
    matrix = log_probs((0.8, 0.1, 0.1), (0.1, 0.8, 0.1))
    matrix[0] = np.nan
    made, failed = gather_predictions(
        tokens([b"a", b"b", b"a"]), scores([b"a", b"b"], matrix, ["not finite", None]), buckets([b"a", b"b"]), LABELS
    )
    assert made["number"].to_list() == [101]
    assert failed.rows() == [(0, "not finite"), (2, "not finite")]


def test_a_table_of_which_every_ticket_failed_and_an_empty_table_give_no_predictions() -> None:
    matrix = np.full((1, 3), np.nan, dtype=np.float32)
    made, failed = gather_predictions(tokens([b"a"]), scores([b"a"], matrix, ["bad"]), buckets([b"a"]), LABELS)
    assert (len(made), len(failed)) == (0, 1)
    made, failed = gather_predictions(tokens([]), scores([], log_probs()), buckets([]), LABELS)
    assert (len(made), len(failed)) == (0, 0)
    assert made.schema == predictions_schema("number", pl.Int32(), LABELS)


def test_a_ticket_without_a_score_is_an_error_with_its_id() -> None:
    with pytest.raises(ScoringError, match=r"1 of 2 tickets have no score; the first is 101"):
        gather_predictions(tokens([b"a", b"b"]), scores([b"a"], log_probs((0.8, 0.1, 0.1))), buckets([b"a"]), LABELS)


def test_a_ticket_with_two_scores_or_two_buckets_is_an_error_and_never_two_predictions() -> None:
    twice = log_probs((0.8, 0.1, 0.1), (0.1, 0.8, 0.1))
    with pytest.raises(PolarsError, match="m:1"):
        gather_predictions(tokens([b"a"]), scores([b"a", b"a"], twice), buckets([b"a"]), LABELS)
    with pytest.raises(PolarsError, match="m:1"):
        gather_predictions(tokens([b"a"]), scores([b"a"], twice[:1]), buckets([b"a", b"a"]), LABELS)


def test_the_summary_counts_labels_that_nobody_got_as_zero() -> None:
    made, failed = gather_predictions(
        tokens([b"a", b"b"]),
        scores([b"a", b"b"], log_probs((0.8, 0.1, 0.1), (0.7, 0.2, 0.1))),
        buckets([b"a", b"b"]),
        LABELS,
    )
    summary = summarise(made, failed, LABELS)
    assert (summary.predictions, summary.failed) == (2, 0)
    assert summary.label_counts == {"billing": 2, "delivery": 0, "returns": 0}


def test_every_ticket_of_the_bucket_files_is_found_with_its_buckets_index(tmp_path: Path) -> None:
    for index, keys in ((0, [b"a", b"b"]), (12, [b"c"])):
        pl.DataFrame({"ticket_key": keys, "more": keys}).write_parquet(tmp_path / f"{index:04d}.parquet")
    made = bucket_of_tickets(sorted(tmp_path.iterdir()))
    assert made.rows() == [(b"a", 0), (b"b", 0), (b"c", 12)]
    assert made.schema == bucket_of_tickets([]).schema


def test_with_a_head_predictions_tell_after_how_many_layers_they_were_decided() -> None:
    keys = [b"a", b"b", b"c", b"d"]
    made, failed = gather_predictions(
        tokens(keys), scores(keys, log_probs(*[(0.2, 0.7, 0.1)] * 4)), buckets(keys), LABELS, has_head=True
    )
    assert made["stage"].to_list() == [0, 1, 2, 0]
    assert summarise(made, failed, LABELS).stage_counts == {"0": 2, "1": 1, "2": 1}
