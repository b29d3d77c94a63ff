"""Temperatures, calibration error and thresholds."""

import numpy as np
import pytest

from ticket_engine.calibration import (
    PROMISE_CONFIDENCE,
    best_log_loss,
    budget_threshold,
    exit_threshold,
    expected_calibration_error,
    fit_temperature,
    log_softmax,
    lower_bound,
    precision_threshold,
    reliability,
)
from ticket_engine.errors import SettingsError


def test_log_softmax_rows_sum_to_one_and_do_not_overflow() -> None:
    made = log_softmax(np.array([[1e4, 0.0, -1e4], [0.1, 0.2, 0.3]]))
    np.testing.assert_allclose(np.exp(made).sum(1), 1)
    assert np.isfinite(made).all()


@pytest.mark.parametrize("factor", [2.0, 9.0])
def test_the_temperature_of_drawn_labels_is_found_again(factor: float) -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(4000, 4)) / 3
    probs = np.exp(log_softmax(factor * scores))
    truth = (rng.random(4000)[:, None] > probs.cumsum(1)).sum(1)
    assert fit_temperature(scores, truth) == pytest.approx(factor, rel=0.1)


def test_log_loss_at_the_best_temperature_does_not_mind_the_scale_of_scores() -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(300, 4)) / 4
    truth = (scores + rng.gumbel(size=(300, 4)) / 8).argmax(1)
    assert best_log_loss(scores, truth) == pytest.approx(best_log_loss(2 * scores, truth), abs=0.01)
    assert best_log_loss(scores, truth) < best_log_loss(scores, rng.permutation(truth))


def test_calibration_error_is_the_mean_gap_of_the_bins() -> None:
    confidence = np.array([0.95, 0.95, 0.55, 0.55])
    correct = np.array([True, True, True, False])
    assert expected_calibration_error(confidence, correct) == pytest.approx(0.05)
    assert [bin_.tickets for bin_ in reliability(confidence, correct)] == [2, 2]


def test_confidence_one_and_zero_have_bins() -> None:
    assert [b.upper for b in reliability(np.array([0.0, 1.0]), np.array([False, True]))] == [0.1, 1.0]


def broken_promises(rate: np.ndarray, precision: float, *, rounds: int = 2000) -> float:
    """Share of fits whose threshold leaves a lower true precision, ``rate`` being that of each ticket, surest first."""
    rng, confidence = np.random.default_rng(0), np.linspace(0.99, 0.5, len(rate))
    broken = 0
    for _ in range(rounds):
        threshold = precision_threshold(confidence, rng.random(len(rate)) < rate, precision)
        broken += threshold is not None and rate[confidence >= threshold].mean() < precision
    return broken / rounds


@pytest.mark.parametrize("tickets", [100, 300, 1000])
def test_a_promise_breaks_no_oftener_than_its_level_says_although_the_threshold_is_chosen(tickets: int) -> None:
    """The largest share that passes a bound of its own broke it in 27, 36 and 46 % of fits at this flat precision."""
    assert broken_promises(np.full(tickets, 0.945), 0.95) <= 0.2
    assert broken_promises(np.full(tickets, 0.799), 0.8) <= 0.2
    assert broken_promises(np.linspace(1.0, 0.88, tickets), 0.95) <= 0.2  # a threshold that keeps it exists
    assert PROMISE_CONFIDENCE == 0.8  # the level that docs and reports state


def test_a_promise_that_can_be_kept_is_given_for_many_tickets() -> None:
    rng, confidence = np.random.default_rng(1), np.linspace(0.99, 0.5, 300)
    rate = np.where(np.arange(300) < 200, 0.99, 0.6)
    thresholds = [precision_threshold(confidence, rng.random(300) < rate, 0.95) for _ in range(200)]
    kept = [0 if threshold is None else int((confidence >= threshold).sum()) for threshold in thresholds]
    assert np.median(kept) > 150
    assert np.mean([count > 0 for count in kept]) > 0.85


def test_tickets_beyond_the_first_share_that_fails_are_not_kept() -> None:
    confidence = np.linspace(0.99, 0.01, 400)
    correct = np.arange(400) < 300
    threshold = precision_threshold(confidence, correct, 0.9)
    kept = confidence >= threshold
    assert kept.sum() == 320  # 300 right of 320: the lower bound of 340 would be below 0.9
    assert lower_bound(300, 320, 1 - 0.2 / 3) >= 0.9 > lower_bound(300, 340, 1 - 0.2 / 3)


def test_few_rows_that_are_all_right_support_no_certainty() -> None:
    """Scores that tell everything apart once drove the factor to its bound: confidence 0.99 whatever the ticket."""
    for rows in (10, 30, 100):
        scores = np.eye(3)[np.arange(rows) % 3] * 0.5
        factor = fit_temperature(scores, np.arange(rows) % 3)
        sure = np.exp(log_softmax(factor * scores).max(1)).mean()
        assert sure == pytest.approx((rows + 1) / (rows + 2), abs=0.003)


def test_a_precision_that_nothing_keeps_has_no_threshold() -> None:
    assert precision_threshold(np.linspace(0, 1, 50), np.arange(50) % 2 == 0, 0.95) is None
    assert precision_threshold(np.zeros(0), np.zeros(0, dtype=bool), 0.95) is None


def test_tickets_of_equal_confidence_are_kept_or_left_together() -> None:
    confidence = np.array([0.9] * 40 + [0.8] * 40)
    correct = np.array([True] * 79 + [False])
    threshold = precision_threshold(confidence, correct, 0.92)
    assert threshold in (0.8, 0.9)
    all_equal = precision_threshold(np.full(40, 0.7), np.arange(40) < 20, 0.5)
    assert all_equal is None  # the bound of 20 in 40 lies below one half


@pytest.mark.parametrize("precision", [0.0, 1.0, 2.0])
def test_an_impossible_promise_is_a_settings_error(precision: float) -> None:
    with pytest.raises(SettingsError, match="Allowed: above 0 and below 1"):
        precision_threshold(np.ones(3), np.ones(3, dtype=bool), precision)


@pytest.mark.parametrize(("share", "below"), [(0.0, 0), (0.1, 1), (0.55, 5), (1.0, 10)])
def test_a_budget_is_never_exceeded(share: float, below: int) -> None:
    confidence = np.linspace(0.1, 1, 10)
    assert (confidence < budget_threshold(confidence, share)).sum() == below


def test_a_budget_among_ties_sends_fewer_rather_than_more() -> None:
    confidence = np.array([0.5, 0.5, 0.5, 0.9])
    assert (confidence < budget_threshold(confidence, 0.5)).sum() == 0


def test_a_budget_outside_zero_and_one_is_a_settings_error() -> None:
    with pytest.raises(SettingsError, match=r"review budget is 1\.5"):
        budget_threshold(np.ones(3), 1.5)


def test_leaving_early_stops_before_it_costs_more_than_allowed() -> None:
    confidence = np.linspace(1, 0.001, 1000)
    correct, deeper = np.ones(1000, dtype=bool), np.ones(1000, dtype=bool)
    correct[[500, 600, 700]] = False
    strict = exit_threshold(confidence, correct, deeper, 0.001)
    loose = exit_threshold(confidence, correct, deeper, 0.01)
    assert (confidence >= strict).sum() == 500  # one loss and its error already exceed one ticket
    assert (confidence >= loose).sum() == 1000


def test_a_stage_that_is_wrong_at_once_decides_nothing() -> None:
    confidence = np.linspace(1, 0.1, 100)
    assert exit_threshold(confidence, np.zeros(100, dtype=bool), np.ones(100, dtype=bool), 0.005) is None


def test_a_lucky_stage_needs_more_than_luck() -> None:
    """Losses and gains that cancel out are noise, not a licence."""
    confidence = np.linspace(1, 0.1, 100)
    correct, deeper = np.ones(100, dtype=bool), np.ones(100, dtype=bool)
    deeper[10], correct[11] = False, False
    assert (
        confidence >= exit_threshold(confidence, correct, deeper, 0.005)
    ).sum() == 11  # the gain alone is no loss; with the loss behind it the error counts


def test_too_few_tickets_to_see_the_allowed_loss_allow_no_stage() -> None:
    right = np.ones(99, dtype=bool)
    assert exit_threshold(np.linspace(1, 0.1, 99), right, right, 0.005) is None
    right = np.ones(100, dtype=bool)
    assert exit_threshold(np.linspace(1, 0.1, 100), right, right, 0.005) == pytest.approx(0.1)
