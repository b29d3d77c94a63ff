"""Temperatures, calibration error and thresholds."""

import numpy as np
import pytest

from ticket_engine.calibration import (
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


def test_a_promised_precision_keeps_as_many_tickets_as_its_bound_allows() -> None:
    confidence = np.linspace(0.99, 0.01, 400)
    correct = np.arange(400) < 300
    threshold = precision_threshold(confidence, correct, 0.9)
    kept = confidence >= threshold
    assert lower_bound(correct[kept].sum(), kept.sum()) >= 0.9
    assert lower_bound(correct[: kept.sum() + 1].sum(), kept.sum() + 1) < 0.9
    assert 300 < kept.sum() < 334


def test_a_precision_that_nothing_keeps_has_no_threshold() -> None:
    assert precision_threshold(np.linspace(0, 1, 50), np.arange(50) % 2 == 0, 0.95) is None
    assert precision_threshold(np.zeros(0), np.zeros(0, dtype=bool), 0.95) is None


def test_tickets_of_equal_confidence_are_kept_or_left_together() -> None:
    confidence = np.array([0.9] * 40 + [0.8] * 40)
    correct = np.array([True] * 79 + [False])
    threshold = precision_threshold(confidence, correct, 0.96)
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
