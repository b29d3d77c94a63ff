"""Scores turned into probabilities that mean what they say, and the thresholds that rest on them."""

from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

from ticket_engine.errors import SettingsError

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.5, 200.0
PROMISE_CONFIDENCE = 0.8
_CHAIN_STARTS = (0.25, 0.5, 0.75)
_SHARES = np.arange(1, 21) / 20
_FACTORS = tuple(2.0 ** (step / 2) for step in range(2, 14))
EXIT_ERRORS = 1.0  # standard errors added to the loss of leaving early


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Tickets whose confidence lies in ``(lower, upper]``: how many, how sure, how right."""

    lower: float
    upper: float
    tickets: int
    confidence: float
    accuracy: float


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """Natural log of the softmax over the last axis, in the dtype of ``scores``."""
    shifted = scores - scores.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def fit_temperature(scores: np.ndarray, label_indices: np.ndarray) -> float:
    """The factor on held-out scores that makes the true labels most likely (Guo et al. 2017, inverse).

    ``log_softmax(factor * scores)`` is calibrated; ridge scores lie near 0 and 1, so it is above 1. Of ``n`` rows a true
    label counts ``(n + 1) / (n + 2)`` and the others the rest (rule of succession, as Platt 1999 does): where all rows are
    right, they support no more confidence than that.

    Args:
        scores: Of rows that the fit did not see, ``(rows, labels)``.
        label_indices: True labels, int ``(rows,)``.
    """
    rows, others = np.arange(len(scores)), scores.shape[1] - 1
    doubt = 1 / (len(scores) + 2)

    def loss(log_factor: float) -> float:
        log_probs = log_softmax(np.exp(log_factor) * scores)
        true = log_probs[rows, label_indices]
        return -float(((1 - doubt) * true + doubt * (log_probs.sum(1) - true) / others).mean())

    bounds = (np.log(MIN_TEMPERATURE), np.log(MAX_TEMPERATURE))
    return float(np.exp(optimize.minimize_scalar(loss, bounds=bounds, method="bounded").x))


def best_log_loss(scores: np.ndarray, label_indices: np.ndarray) -> float:
    """Mean minus log-probability of the true labels at the best of a few temperatures: scores judged whatever their scale."""
    rows = np.arange(len(scores))
    return min(-float(log_softmax(factor * scores)[rows, label_indices].mean()) for factor in _FACTORS)


def reliability(confidence: np.ndarray, correct: np.ndarray, bins: int = 10) -> tuple[ReliabilityBin, ...]:
    """Equal-width bins that hold at least one ticket, lowest confidence first."""
    edges = np.linspace(0, 1, bins + 1)
    place = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    made = []
    for index in range(bins):
        inside = place == index
        if inside.any():
            mean, right = float(confidence[inside].mean()), float(correct[inside].mean())
            made.append(ReliabilityBin(float(edges[index]), float(edges[index + 1]), int(inside.sum()), mean, right))
    return tuple(made)


def expected_calibration_error(confidence: np.ndarray, correct: np.ndarray, bins: int = 10) -> float:
    """Mean over tickets of ``|confidence - accuracy|`` of their bin; 0 is perfect."""
    made = reliability(confidence, correct, bins)
    return float(sum(b.tickets * abs(b.confidence - b.accuracy) for b in made) / max(len(confidence), 1))


def lower_bound(right: np.ndarray, tickets: np.ndarray, confidence: float = PROMISE_CONFIDENCE) -> np.ndarray:
    """One-sided Clopper-Pearson lower bound of a share; 0 where nothing is right."""
    right, tickets = np.asarray(right, dtype=float), np.asarray(tickets, dtype=float)
    bound = stats.beta.ppf(1 - confidence, np.maximum(right, 1), tickets - right + 1)
    return np.where(right > 0, bound, 0.0)


def precision_threshold(confidence: np.ndarray, correct: np.ndarray, precision: float) -> float | None:
    """Least confidence at which an automatic label keeps a promised precision; None if none can be promised.

    The promise holds in four of five fits (`PROMISE_CONFIDENCE`) for the threshold that is chosen, not only for one named
    beforehand: shares of the surest tickets are tested in an order fixed before (a twentieth more each time), in three
    chains that begin at a quarter, a half and three quarters, each with a third of the chance of error; a chain ends at the
    first share whose lower bound misses ``precision`` (fixed-sequence testing: Angelopoulos et al., Learn then Test, 2021).

    Args:
        confidence: Highest label probability of tickets that chose nothing about the head.
        correct: Whether its label was right, bool.
        precision: Promised share of right labels, above 0 and below 1.

    Raises:
        SettingsError: ``precision`` is out of range.
    """
    if not 0 < precision < 1:
        raise SettingsError(f"The promised precision is {precision}. Allowed: above 0 and below 1, such as 0.95.")
    order = np.argsort(-confidence, kind="stable")
    ordered = confidence[order]
    tickets = len(order)
    right = np.cumsum(correct[order])
    last_of_value = np.append(np.flatnonzero(ordered[1:] != ordered[:-1]), tickets - 1) + 1 if tickets else []
    error, kept = (1 - PROMISE_CONFIDENCE) / len(_CHAIN_STARTS), 0
    for start in _CHAIN_STARTS if tickets else ():
        for share in _SHARES[start - 1e-9 <= _SHARES]:
            count = int(last_of_value[np.searchsorted(last_of_value, np.ceil(share * tickets - 1e-9))])
            if lower_bound(right[count - 1], count, 1 - error) < precision:
                break
            kept = max(kept, count)
    return float(ordered[kept - 1]) if kept else None


def budget_threshold(confidence: np.ndarray, share: float) -> float:
    """Confidence below which at most ``share`` of these tickets lie; tickets below it go to people.

    Raises:
        SettingsError: ``share`` is not within 0 and 1.
    """
    if not 0 <= share <= 1:
        raise SettingsError(f"The review budget is {share}. Allowed: a share from 0 to 1, such as 0.1.")
    count = int(np.floor(share * len(confidence) + 1e-9))
    ordered = np.sort(confidence)
    return float(ordered[count]) if count < len(ordered) else float("inf")


def exit_threshold(
    confidence: np.ndarray, correct: np.ndarray, deeper_correct: np.ndarray, allowed_loss: float
) -> float | None:
    """Least confidence at which a stage may decide a ticket; None if the stage should decide none.

    Going down from the surest ticket, ``lost - gained + sqrt(lost + gained + 1/4)`` stays within
    ``allowed_loss`` of all tickets all along: tickets that the stage gets wrong and the deeper stage
    right, less those the other way round, plus one standard error. Without the error term few rows gave
    lucky thresholds (docs/log.md); with it, fewer than ``1 / (2 * allowed_loss)`` tickets allow none.

    Args:
        confidence: The stage's highest label probability on held-out tickets.
        correct: Whether the stage's label is right.
        deeper_correct: Whether the deepest stage's label is right.
        allowed_loss: Share of all tickets, such as 0.0025.
    """
    order = np.argsort(-confidence, kind="stable")
    ordered = confidence[order]
    difference = deeper_correct[order].astype(int) - correct[order].astype(int)
    loss = np.cumsum(difference) + EXIT_ERRORS * np.sqrt(np.cumsum(np.abs(difference)) + 0.25)
    too_many = np.flatnonzero(loss > allowed_loss * len(order))
    last = int(too_many[0]) if len(too_many) else len(order)
    while 0 < last < len(order) and ordered[last - 1] == ordered[last]:
        last -= 1
    return float(ordered[last - 1]) if last > 0 else None
