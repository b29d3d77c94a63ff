"""Kernel ridge regression on one-hot labels, with the error on each left-out row in closed form.

Why not logistic regression: on the same features it was no better (docs/log.md), and here one
decomposition gives the left-out answers of every row at every strength, which is what choosing depths,
blends and thresholds on few labelled tickets needs.

With ``K`` the kernel, ``V = diag(row_weights)`` and ``T`` the centred targets::

    alpha    = (K + strength V^-1)^-1 T
    fitted   = K alpha + bias
    left_out = T_i - alpha_i / [(K + strength V^-1)^-1]_ii + bias     (Allen 1974, PRESS)
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import linalg

STRENGTHS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
ROWS_OF_A_STRENGTH = 100  # strengths are stated for this many rows and grow with them


@dataclass(frozen=True, slots=True)
class RidgeFit:
    """One fit.

    Attributes:
        alpha: float64 ``(rows, labels)``; a new row's scores are ``kernel @ alpha + bias``.
        bias: float64 ``(labels,)``, the weighted label shares of the fitting rows.
        left_out: float64 ``(rows, labels)``, scores of each row from the fit without it.
        strength: The chosen one.
        error: Left-out error by which the strength was chosen.
    """

    alpha: np.ndarray
    bias: np.ndarray
    left_out: np.ndarray
    strength: float
    error: float


@dataclass(frozen=True, slots=True)
class Decomposition:
    """Eigenvalues and vectors of ``V^1/2 K V^1/2``, made once and used for every strength and target."""

    values: np.ndarray
    vectors: np.ndarray
    roots: np.ndarray


def decompose(kernel: np.ndarray, row_weights: np.ndarray | None = None) -> Decomposition:
    """The decomposition of a kernel.

    Args:
        kernel: Symmetric, positive semi-definite, ``(rows, rows)``; not modified.
        row_weights: How much each row's error counts, positive, ``(rows,)``. None: 1 each.
    """
    roots = np.ones(len(kernel)) if row_weights is None else np.sqrt(np.asarray(row_weights, dtype=np.float64))
    scaled = kernel.astype(np.float64) * roots[:, None] * roots[None, :]
    values, vectors = linalg.eigh(scaled, overwrite_a=True, check_finite=False, driver="evd")
    return Decomposition(np.maximum(values, 0.0), vectors, roots)


def fit_ridge(
    made: Decomposition,
    targets: np.ndarray,
    *,
    judge: Callable[[np.ndarray], float] | None = None,
    strengths: tuple[float, ...] = STRENGTHS,
) -> RidgeFit:
    """The fit whose strength has the least left-out error.

    Args:
        made: Of the kernel.
        targets: float64 ``(rows, labels)``, one-hot.
        judge: Error of left-out scores ``(rows, labels)``. None: mean squared error over all rows.
        strengths: Candidates, for 100 rows.
    """
    weights = made.roots**2
    bias = (weights[:, None] * targets).sum(0) / weights.sum()
    centred = targets - bias
    rotated = made.vectors.T @ (made.roots[:, None] * centred)
    squares = made.vectors**2
    best: RidgeFit | None = None
    for strength in strengths:
        inverse = 1.0 / (made.values + strength * len(targets) / ROWS_OF_A_STRENGTH)
        inner = made.vectors @ (inverse[:, None] * rotated)
        residuals = inner / (made.roots * (squares @ inverse))[:, None]
        left_out = targets - residuals
        error = float((residuals**2).sum(1).mean()) if judge is None else judge(left_out)
        if best is None or error < best.error:
            best = RidgeFit(made.roots[:, None] * inner, bias, left_out, strength, error)
    return best


def one_hot(label_indices: np.ndarray, labels: int) -> np.ndarray:
    """float64 ``(rows, labels)`` with one 1 a row."""
    return np.eye(labels)[label_indices]
