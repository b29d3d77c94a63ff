"""The sample, what its answers prove, and what it finds that a plain random sample does not."""

import math
from collections.abc import Sequence

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ticket_engine.results import decide
from ticket_engine.schemas import LOG_PROBS
from ticket_engine.spot_check import KNOWN_BEFORE, check_predictions, compare, table_bound, upper_bound
from ticket_engine.spot_sample import (
    COVERING,
    IN_FLOAT32,
    LONGEST,
    RANDOM,
    SECOND_LOOK,
    SHORTEST,
    SMALLEST_MARGIN,
    SUSPICIOUS,
    choose_more,
    choose_sample,
)

LABELS = ("billing", "delivery", "returns", "account")


def predictions(sizes: Sequence[int], *, seed: int = 0, known_before: int = 0) -> pl.DataFrame:
    """Predictions in buckets of the given sizes, longest tickets first, and some known from an earlier run."""
    rows = sum(sizes) + known_before
    scores = np.random.default_rng(seed).normal(size=(rows, len(LABELS)))
    log_probs = (scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)).astype(np.float32)
    buckets = [*np.repeat(np.arange(len(sizes)), sizes).tolist(), *[None] * known_before]
    ids = pl.DataFrame({"ticket_id": [f"t{row}" for row in range(rows)]})
    return ids.hstack(decide(log_probs, LABELS)).with_columns(
        pl.Series("token_length", np.arange(rows, 0, -1), dtype=pl.UInt32),
        pl.Series("is_truncated", [False] * rows, dtype=pl.Boolean),
        pl.Series("bucket_index", buckets, dtype=pl.UInt32),
    )


def answered(sample: pl.DataFrame, wrong: Sequence[bool] | None = None) -> pl.DataFrame:
    """The sample with the reference's answers: the same scores, or in wrong rows another label, far beyond tolerance."""
    scores = sample[LOG_PROBS].struct.unnest().to_numpy().reshape(-1, len(LABELS)).copy()
    if wrong is not None:
        scores[np.asarray(wrong)] = np.roll(scores[np.asarray(wrong)], 1, axis=1)
    names = [LABELS[row.argmax()] for row in scores]
    return sample.with_columns(
        pl.Series("reference_label", names, dtype=pl.String),
        pl.Series("reference_log_probs", scores.tolist(), dtype=pl.List(pl.Float32)),
    )


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(0, 80), st.integers(0, 3))
def test_a_sample_has_one_from_each_bucket_no_ticket_twice_and_the_promised_size(sizes, size, known_before):
    table = predictions(sizes, known_before=known_before)
    sample = choose_sample(table, size, seed=1)
    assert sample["ticket_id"].n_unique() == len(sample)
    if not size:
        assert len(sample) == 0
        return
    drawn = sample.filter(pl.col("chosen_for") == RANDOM)
    covering = sample.filter(pl.col("chosen_for") == COVERING)
    assert len(drawn) == min(size, len(table))
    assert pl.concat([drawn, covering])["bucket_index"].n_unique() == len(sizes) + (known_before > 0)
    assert not set(covering["bucket_index"]) & set(drawn["bucket_index"])
    rest = len(table) - len(drawn) - len(covering)
    assert len(sample) - len(drawn) - len(covering) == min(math.ceil(size / 4), rest)
    assert (sample["table_tickets"] == len(table)).all()
    assert sample["row"].to_list() == [int(name[1:]) for name in sample["ticket_id"]]
    assert sample.select(table.columns).equals(table.filter(pl.col("ticket_id").is_in(sample["ticket_id"].implode())))


def test_every_ticket_has_the_same_chance_whatever_its_bucket():
    table, rounds, size = predictions((60, 25, 10, 5), known_before=20), 3000, 12
    found = np.zeros(len(table))
    for seed in range(rounds):
        sample = choose_sample(table.select("ticket_id", "bucket_index", "margin", "token_length"), size, seed)
        found[sample.filter(pl.col("chosen_for") == RANDOM)["row"].to_numpy()] += 1
    chance = size / len(table)
    assert np.abs(found / rounds - chance).max() < 4.5 * math.sqrt(chance * (1 - chance) / rounds)


def test_half_a_table_known_before_gets_half_of_the_draws():
    sample = choose_sample(predictions([10] * 30, known_before=300), 32, 0)
    drawn = sample.filter(pl.col("chosen_for") == RANDOM)
    assert drawn["bucket_index"].null_count() == 16


def test_the_same_seed_chooses_the_same_tickets_and_another_seed_others():
    table = predictions([300, 200, 100])
    first, again, other = (choose_sample(table, 32, seed=seed)["ticket_id"].to_list() for seed in (3, 3, 4))
    assert first == again != other


def test_tickets_are_chosen_on_purpose_for_margin_and_length():
    table = predictions([300, 200, 100])
    sample = choose_sample(table, 32, seed=0)
    assert sample["chosen_for"].value_counts().sort("chosen_for").rows() == [
        (LONGEST, 1),
        (RANDOM, 32),
        (SHORTEST, 1),
        (SMALLEST_MARGIN, 6),
    ]
    rest = table.filter(
        ~pl.col("ticket_id").is_in(sample.filter(pl.col("chosen_for") == RANDOM)["ticket_id"].implode())
    )
    chosen = dict(sample.group_by("chosen_for").agg("ticket_id").iter_rows())
    assert chosen[LONGEST] == [rest["ticket_id"][0]]
    assert chosen[SHORTEST] == [rest["ticket_id"][-1]]
    closest = rest.filter(~pl.col("ticket_id").is_in(chosen[LONGEST] + chosen[SHORTEST])).sort("margin")
    assert set(chosen[SMALLEST_MARGIN]) == set(closest["ticket_id"][:6])


def test_a_doubled_ticket_is_sampled_once():
    table = predictions([20])
    sample = choose_sample(pl.concat([table, table]), 40, seed=0)
    assert sorted(sample["ticket_id"]) == sorted(table["ticket_id"])


def test_equal_answers_are_full_agreement():
    result = compare(answered(choose_sample(predictions([300, 200]), 32, 0)), 1e-4, seed=0)
    assert (result.sampled, result.agreed, result.near_ties, result.disagreed) == (40, 40, 0, 0)
    assert result.agreement == result.worst_bucket_agreement == 1.0
    assert result.largest_difference == 0.0
    assert result.disagreeing_ids == ()


def test_other_answers_are_counted_by_bucket_and_by_reason_and_named():
    sample = choose_sample(predictions([300, 200], known_before=50), 32, 0)
    wrong = (sample["bucket_index"] == 1).fill_null(False)
    result = compare(answered(sample, wrong), 1e-4, seed=5)
    assert result.seed == 5
    assert result.disagreed == wrong.sum() == result.sampled - result.agreed
    assert result.agreement == pytest.approx(1 - wrong.mean())
    assert result.worst_bucket_agreement == 0.0
    assert [row["bucket"] for row in result.per_bucket] == [0, 1, KNOWN_BEFORE]
    assert [row["tickets"] for row in result.per_bucket] == [300, 200, 50]
    assert [row["disagreed"] for row in result.per_bucket] == [0, wrong.sum(), 0]
    assert result.per_bucket[1]["upper_bound"] == 1.0
    assert set(result.disagreeing_ids) == set(sample.filter(wrong)["ticket_id"].head(20))
    reasons = {row["chosen_for"]: row for row in result.chosen_for}
    drawn_wrong = sample.filter(wrong & (sample["chosen_for"] == RANDOM))
    assert reasons[RANDOM] == {
        "chosen_for": RANDOM,
        "sampled": result.drawn,
        "near_ties": 0,
        "disagreed": len(drawn_wrong),
    }
    assert sum(row["sampled"] for row in result.chosen_for) == result.sampled


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(1, 40), st.integers(0, 50))
def test_a_second_look_draws_more_of_the_table_and_of_suspicious_buckets_and_nothing_twice(sizes, size, known_before):
    table = predictions(sizes, known_before=known_before)
    sample = choose_sample(table, size, 1)
    suspicious = [0, None] if known_before else [0]
    more = choose_more(table, sample, suspicious, 1)
    both = pl.concat([sample, more])
    assert both["row"].n_unique() == len(both)
    assert set(more["chosen_for"]) <= {SECOND_LOOK, SUSPICIOUS}
    second = more.filter(pl.col("chosen_for") == SECOND_LOOK)
    assert len(second) == min(16 * min(size, len(table)), len(table) - len(sample))
    in_bucket = both.filter(pl.col("bucket_index") == 0)
    assert len(in_bucket) >= min(sizes[0], 12)
    again = choose_more(table, both, [len(sizes) - 1], 1)
    assert set(again["chosen_for"]) <= {SUSPICIOUS}
    assert not set(again["row"]) & set(both["row"])
    assert set(more.filter(pl.col("chosen_for") == SUSPICIOUS)["bucket_index"]) <= {0, None}


def test_a_ticket_that_disagrees_leads_to_a_second_look_and_none_to_none():
    table = predictions([400, 400, 400])
    asked = []

    def rescore(wrong: set[str]):
        def answer(sample: pl.DataFrame) -> pl.DataFrame:
            asked.append(len(sample))
            return answered(sample, sample["ticket_id"].is_in(wrong).to_numpy())

        return answer

    calm = check_predictions(table, 32, 0, tolerance=1e-4, rescore=rescore(set()))
    assert (asked, calm.second_look, calm.sampled) == ([40], False, 40)
    one = choose_sample(table, 32, 0)["ticket_id"][5]
    asked.clear()
    looked = check_predictions(table, 32, 0, tolerance=1e-4, rescore=rescore({one}))
    assert len(asked) == 2
    assert looked.second_look
    assert looked.disagreed == 1
    assert looked.drawn == 32 + 16 * 32
    assert looked.agreement > 0.99
    assert looked.worst_bucket_agreement > 0.9
    assert looked.upper_bound < 0.02


@pytest.mark.parametrize(("sizes", "size", "expected"), [([300, 200], 32, 10), ([300, 200], 8, 8), ([3], 8, 3)])
def test_a_quarter_of_the_sample_and_at_least_eight_tickets_are_to_be_scored_in_float32(sizes, size, expected):
    first, again = (choose_sample(predictions(sizes), size, seed=3)[IN_FLOAT32] for _ in range(2))
    assert first.sum() == expected
    assert first.equals(again)


def test_what_only_float32_sees_is_counted_and_named_and_rounding_is_a_near_tie():
    sample = choose_sample(predictions([60, 40]), 32, 0)
    asked = sample[IN_FLOAT32].to_list()
    right = answered(sample)["reference_log_probs"].to_list()
    turned, close = [row for row, is_asked in enumerate(asked) if is_asked][:2]
    exact = [scores if is_asked else None for scores, is_asked in zip(right, asked, strict=True)]
    exact[turned] = [*right[turned][1:], right[turned][0]]
    best, second = np.argsort(right[close])[::-1][:2]
    exact[close] = list(right[close])
    exact[close][best], exact[close][second] = right[close][second], right[close][best]
    frame = answered(sample).with_columns(pl.Series("float32_log_probs", exact, dtype=pl.List(pl.Float32)))
    gap = right[close][best] - right[close][second]
    result = compare(frame, tolerance=gap * 1.01, seed=0)
    assert result.float32_sampled == sum(asked) == 10
    assert result.float32_near_ties + result.float32_disagreed == 2
    assert (result.near_ties, result.disagreed) == (result.float32_near_ties, result.float32_disagreed)
    assert sample["ticket_id"][close] not in result.disagreeing_ids
    strict = compare(frame, tolerance=1e-6, seed=0)
    assert (strict.disagreed, strict.float32_disagreed, strict.near_ties) == (2, 2, 0)
    assert set(strict.disagreeing_ids) == {sample["ticket_id"][row] for row in (turned, close)}
    assert strict.float32_largest_difference > 0 == strict.largest_difference


def pair(mine: tuple[float, float], theirs: tuple[float, float]) -> pl.DataFrame:
    """A sample of one ticket with two labels, from both scorers' log-probabilities."""
    names = ("yes", "no")
    frame = decide(np.array([mine], dtype=np.float32), names)
    return frame.select(pl.lit("t0").alias("ticket_id"), pl.all()).with_columns(
        pl.lit(0, pl.UInt32).alias("bucket_index"),
        pl.lit(RANDOM).alias("chosen_for"),
        pl.lit(10, pl.UInt32).alias("bucket_tickets"),
        pl.lit(10, pl.UInt32).alias("table_tickets"),
        pl.lit(names[int(np.argmax(theirs))]).alias("reference_label"),
        pl.Series("reference_log_probs", [list(theirs)], dtype=pl.List(pl.Float32)),
    )


@pytest.mark.parametrize(
    ("mine", "theirs", "near_ties"),
    [
        ((-0.65, -0.74), (-0.74, -0.65), 1),  # gaps of 0.09 each: 0.18 <= 0.2
        ((-0.60, -0.79), (-0.695, -0.691), 1),  # 0.19 and 0.004
        ((-0.60, -0.79), (-0.74, -0.65), 0),  # 0.19 and 0.09 cannot come from 0.1 of rounding
        ((-0.05, -3.0), (-0.74, -0.65), 0),
    ],
)
def test_a_near_tie_is_a_label_that_rounding_within_the_tolerance_can_turn(mine, theirs, near_ties):
    result = compare(pair(mine, theirs), tolerance=0.1, seed=0)
    assert (result.near_ties, result.disagreed) == (near_ties, 1 - near_ties)
    assert result.agreed == 0
    assert result.agreement == near_ties


def test_a_label_outside_the_set_is_never_a_near_tie():
    frame = pair((-0.69, -0.7), (-0.7, -0.69)).with_columns(pl.lit("weather").alias("label"))
    assert compare(frame, tolerance=0.1, seed=0).disagreed == 1


def test_scores_that_are_not_numbers_do_not_hide_behind_an_equal_label():
    frame = pair((float("nan"), -0.7), (-0.7, -0.69)).with_columns(pl.lit("no").alias("label"))
    assert compare(frame, tolerance=0.1, seed=0).largest_difference == 1.0


def test_an_empty_sample_proves_nothing():
    for table, size in ((predictions([20]), 0), (predictions([0]), 32)):
        result = compare(answered(choose_sample(table, size, 0)), 1e-4, seed=0)
        assert (result.sampled, result.agreement, result.worst_bucket_agreement, result.upper_bound) == (
            0,
            None,
            None,
            1.0,
        )
        assert "no ticket" in result.one_line()


@pytest.mark.parametrize(
    ("errors", "drawn", "bound"),
    [(0, 1, 0.95), (0, 32, 0.0894), (0, 300, 0.00994), (1, 32, 0.13985), (3, 100, 0.0757), (5, 5, 1.0), (0, 0, 1.0)],
)
def test_the_bound_is_that_of_clopper_and_pearson(errors, drawn, bound):
    assert upper_bound(errors, drawn) == pytest.approx(bound, abs=5e-5)
    if 0 < bound < 1:  # the bound is the rate at which so few errors have a chance of 5 %
        rate = upper_bound(errors, drawn)
        chance = sum(math.comb(drawn, k) * rate**k * (1 - rate) ** (drawn - k) for k in range(errors + 1))
        assert chance == pytest.approx(0.05)


def test_a_table_that_was_scored_wholly_has_its_true_rate_as_bound():
    sample = choose_sample(predictions([4, 3]), 32, 0)
    result = compare(answered(sample, sample["ticket_id"] == "t0"), 1e-4, 0)
    assert [row["upper_bound"] for row in result.per_bucket] == [0.25, 0.0]
    assert result.upper_bound == pytest.approx(1 / 7)


@pytest.mark.parametrize(
    ("sizes", "known_before"), [((3000,), 0), ((100,) * 30, 0), ((12,) * 250, 0), ((6,) * 250, 1500)]
)
def test_without_errors_the_bound_depends_on_the_sample_and_not_on_the_buckets(sizes, known_before):
    sample = choose_sample(predictions(sizes, known_before=known_before), 32, 0)
    assert compare(answered(sample), 1e-4, 0).upper_bound == pytest.approx(1 - 0.04 ** (1 / 32), rel=0.01)


@pytest.mark.parametrize("faults", [(0.0, 0.1, 0.0), (0.02, 0.02, 0.02), (0.07, 0.0, 0.0), (0.0, 0.0, 0.5)])
def test_the_bound_holds_as_often_as_it_says_with_its_second_look(faults):
    sizes, rounds = (900, 90, 10), 600
    table = predictions(sizes).select("ticket_id", "bucket_index", "margin", "token_length", LOG_PROBS, "label")
    wrong = np.concatenate([np.arange(size) < round(size * rate) for size, rate in zip(sizes, faults, strict=True)])
    held = 0
    for seed in range(rounds):
        result = check_predictions(
            table, 32, seed, tolerance=1e-4, rescore=lambda sample: answered(sample, wrong[sample["row"].to_numpy()])
        )
        held += result.upper_bound >= wrong.mean()
    assert held / rounds >= 0.95 - 2 * math.sqrt(0.95 * 0.05 / rounds)


def test_tickets_chosen_on_purpose_and_of_suspicious_buckets_do_not_enter_the_bound():
    sample = choose_sample(predictions([900, 90, 10]), 32, 0)
    outcome = sample.with_columns(bad=pl.lit(False))
    on_purpose = outcome.with_columns(bad=pl.col("chosen_for") == SMALLEST_MARGIN)
    assert table_bound(on_purpose) == table_bound(outcome)
    assert table_bound(outcome.with_columns(bad=pl.lit(True))) == 1.0


@pytest.mark.parametrize("bucket", range(8))
def test_a_fault_that_fills_one_bucket_is_always_caught(bucket):
    sizes = (400, 300, 100, 60, 60, 40, 30, 10)
    table = predictions(sizes)
    for seed in range(50):
        sample = choose_sample(table, 32, seed)
        result = compare(answered(sample, sample["bucket_index"] == bucket), 1e-4, seed)
        assert result.worst_bucket_agreement == 0.0
        assert result.per_bucket[bucket]["disagreed"] > 0


def test_one_unlucky_ticket_of_many_buckets_is_not_a_bad_bucket():
    """One disagreement of 264 sampled tickets once refused a run: its bucket's only draw was it."""
    table = predictions([50] * 256)
    sample = choose_sample(table, 32, 0)
    unlucky = sample.filter(pl.col("chosen_for") == COVERING)["ticket_id"][0]
    result = check_predictions(
        table, 32, 0, tolerance=1e-4, rescore=lambda rows: answered(rows, (rows["ticket_id"] == unlucky).to_numpy())
    )
    assert result.worst_bucket_agreement >= 12 / 13
    assert result.agreement > 0.99


def test_the_tolerance_of_16_bits_is_not_that_of_what_words_alone_decided():
    frame = pair((-0.65, -0.74), (-0.74, -0.65))
    by_text, by_model = (frame.with_columns(stage=pl.lit(stage, pl.Int16)) for stage in (0, 3))
    assert compare(by_model, tolerance=0.1, seed=0).near_ties == 1
    result = compare(by_text, tolerance=0.1, seed=0)
    assert (result.near_ties, result.disagreed) == (0, 1)
    assert result.largest_text_difference == result.largest_difference > 0.04
    assert compare(by_model, tolerance=0.1, seed=0).largest_text_difference is None


def test_a_label_that_is_not_the_likeliest_by_its_own_scores_is_no_near_tie():
    frame = pair((-0.65, -0.74), (-0.65, -0.74)).with_columns(pl.lit("no").alias("label"))
    assert compare(frame, tolerance=0.1, seed=0).disagreed == 1


def test_the_same_fault_escapes_a_plain_random_sample_as_often_as_theory_says():
    sizes, size, rounds = (400, 300, 100, 60, 60, 40, 30, 10), 32, 4000
    table = predictions(sizes)
    generator = np.random.default_rng(2)
    buckets = table["bucket_index"].to_numpy()
    draws = np.stack([generator.choice(len(table), size, replace=False) for _ in range(rounds)])
    for bucket, tickets in enumerate(sizes):
        share = tickets / len(table)
        escaped = (buckets[draws] != bucket).all(axis=1).mean()
        # without replacement a little less than (1 - share) ** size: 0.72 and not 0.73 for the last bucket
        exact = math.comb(len(table) - tickets, size) / math.comb(len(table), size)
        spread = 4 * math.sqrt(exact * (1 - exact) / rounds)
        assert escaped == pytest.approx(exact, abs=spread + 1e-12)
        assert exact <= (1 - share) ** size
        assert exact == pytest.approx((1 - share) ** size, abs=0.02)
    assert exact == pytest.approx(0.72, abs=0.005)  # docs/contracts.md
