"""Ridge regression: the closed forms against a fit without the row, and against the normal equations."""

import numpy as np
import pytest

from ticket_engine.ridge import decompose, fit_ridge, one_hot


def make_rows(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(30, 8)), one_hot(rng.integers(0, 3, 30), 3)


def direct(features: np.ndarray, centred: np.ndarray, strength: float, weights: np.ndarray) -> np.ndarray:
    """The oracle: weights of the primal problem."""
    gram = features.T @ (weights[:, None] * features) + strength * np.eye(features.shape[1])
    return np.linalg.solve(gram, features.T @ (weights[:, None] * centred))


@pytest.mark.parametrize("weighted", [False, True])
def test_scores_equal_those_of_the_normal_equations(weighted: bool) -> None:
    features, targets = make_rows()
    weights = np.linspace(0.5, 2, 30) if weighted else np.ones(30)
    fit = fit_ridge(decompose(features @ features.T, weights), targets, strengths=(0.4,))
    slow = direct(features, targets - fit.bias, 0.4 * 30 / 100, weights)
    np.testing.assert_allclose(features.T @ fit.alpha, slow, atol=1e-8)


@pytest.mark.parametrize("weighted", [False, True])
def test_left_out_scores_equal_fits_without_the_row(weighted: bool) -> None:
    features, targets = make_rows(1)
    weights = np.linspace(0.5, 2, 30) if weighted else np.ones(30)
    fit = fit_ridge(decompose(features @ features.T, weights), targets, strengths=(0.4,))
    for row in range(30):
        others = np.arange(30) != row
        slow = direct(features[others], (targets - fit.bias)[others], 0.4 * 30 / 100, weights[others])
        np.testing.assert_allclose(fit.left_out[row], features[row] @ slow + fit.bias, atol=1e-8)


def test_the_strength_with_the_least_left_out_error_is_taken() -> None:
    features, targets = make_rows(2)
    made = decompose(features @ features.T)
    errors = {strength: fit_ridge(made, targets, strengths=(strength,)).error for strength in (0.01, 1.0, 100.0)}
    assert fit_ridge(made, targets, strengths=tuple(errors)).strength == min(errors, key=errors.get)


def test_a_judge_decides_instead_of_the_squared_error() -> None:
    features, targets = make_rows(3)
    made = decompose(features @ features.T)
    spread = fit_ridge(made, targets, judge=lambda left_out: -float(left_out.std()), strengths=(0.01, 1.0, 100.0))
    assert spread.strength == 0.01  # the weakest ridge shrinks least
    assert spread.error == pytest.approx(-spread.left_out.std())


def test_the_kernel_is_not_modified() -> None:
    features, _ = make_rows()
    kernel = features @ features.T
    before = kernel.copy()
    decompose(kernel)
    np.testing.assert_array_equal(kernel, before)
