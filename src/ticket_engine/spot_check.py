"""What scoring sampled tickets again by the reference proves; which tickets those are, `spot_sample` says.

Where a run computes in a 16-bit format, a part of the sample is scored in float32 too: the reference in the
run's own format shows that packing and sharing changed nothing, the one in float32 what the format itself does.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import polars as pl
from scipy.stats import beta

from ticket_engine.engine_spec import TOLERANCE
from ticket_engine.schemas import BUCKET_INDEX, LABEL, LOG_PROBS, STAGE
from ticket_engine.spot_sample import (
    BUCKET_TICKETS,
    CHOSEN_FOR,
    COVERING,
    RANDOM,
    SECOND_LOOK,
    SUSPICIOUS,
    TABLE_TICKETS,
    choose_more,
    choose_sample,
)

REFERENCE_LABEL, REFERENCE_LOG_PROBS, FLOAT32_LOG_PROBS = (
    "reference_label",
    "reference_log_probs",
    "float32_log_probs",
)
KNOWN_BEFORE = "known before"  # the bucket of tickets that an earlier run scored
MOST_EXAMPLES = 20
MOST_LOOKS = 4  # a second look may meet buckets that were not suspicious before
EXACT = TOLERANCE["float32"]  # what the text alone decides is not rounded to 16 bits
SECOND_ERROR = 0.2  # share of the chance of error that the bound after a second look has; the first bound has the rest


@dataclass(frozen=True, slots=True)
class SpotCheck:
    """What a spot check found.

    Attributes:
        sampled: Tickets scored again.
        agreed: Those with the same label, in float32 too where it was asked.
        near_ties: Those whose label differs only within the tolerance, see `compare`.
        disagreed: Those that really differ, in the run's dtype or in float32.
        agreement: ``1 - disagreed / sampled`` over all but the tickets drawn because their bucket was suspicious;
            None if none was sampled.
        drawn: Tickets of the sample that were drawn at random over the whole table.
        second_look: Whether more were drawn because one disagreed.
        near_tie_rate: Share of near-ties among the drawn ones, None if there are none.
        upper_bound: With ``confidence``, at most this share of all predictions really differs from the
            reference; inferred from the drawn tickets only.
        confidence: Of each bound.
        worst_bucket_agreement: Lowest agreement of a bucket, None if none was sampled.
        largest_difference: Largest difference of a label's probability; 1 where one is not a number.
        largest_text_difference: The same among tickets that their text alone decided, None if none was sampled.
        tolerance: Most by which rounding may move a log-probability.
        is_16_bit: Whether that is the tolerance of a 16-bit format.
        seed: Of the sample.
        per_bucket: A row a bucket: ``bucket, tickets, sampled, drawn, agreed, near_ties, disagreed, upper_bound``.
        float32_sampled: Tickets of the sample that were scored in float32 too; 0 where the run is in float32.
        float32_near_ties: Of these, those whose float32 label differs only within the tolerance.
        float32_disagreed: Of these, those whose float32 label really differs.
        float32_largest_difference: Largest difference of a label's probability from float32, None if none was asked.
        chosen_for: A row for drawn tickets and for each kind chosen on purpose: ``chosen_for, sampled, near_ties,
            disagreed``.
        disagreeing_ids: Up to 20.
    """

    sampled: int
    agreed: int
    near_ties: int
    disagreed: int
    agreement: float | None
    drawn: int
    second_look: bool
    near_tie_rate: float | None
    upper_bound: float
    confidence: float
    worst_bucket_agreement: float | None
    largest_difference: float
    largest_text_difference: float | None
    tolerance: float
    is_16_bit: bool
    seed: int
    float32_sampled: int
    float32_near_ties: int
    float32_disagreed: int
    float32_largest_difference: float | None
    per_bucket: tuple[dict, ...]
    chosen_for: tuple[dict, ...]
    disagreeing_ids: tuple

    def one_line(self) -> str:
        """For a log."""
        if not self.sampled:
            return "no ticket was scored again"
        return (
            f"{self.agreed} of {self.sampled} agree, {self.near_ties} near-ties, {self.disagreed} disagree; "
            f"at most {self.upper_bound:.1%} of all differ; probabilities differ by up to {self.largest_difference:.3g}"
            + (f"; {self.float32_sampled} of them asked in float32 too" if self.float32_sampled else "")
        )


def check_predictions(
    predictions: pl.DataFrame,
    size: int,
    seed: int,
    *,
    tolerance: float,
    rescore: Callable[[pl.DataFrame], pl.DataFrame],
) -> SpotCheck:
    """A spot check of a table: a sample, and a second look where a ticket of it disagrees.

    Args:
        predictions: Figures of all rows, see `spot_sample.choose_sample`.
        size: Tickets to draw at first, 0 for none.
        seed: Of the sample.
        tolerance: Most by which rounding may move a log-probability, natural log.
        rescore: The reference's answers for rows of a sample, in the form that `compare` takes.
    """
    sample = choose_sample(predictions, size, seed)
    scored, looked_into = rescore(sample), []
    for _ in range(MOST_LOOKS):
        bad = scored.filter(_judged(scored, tolerance).bad)[BUCKET_INDEX].unique(maintain_order=True)
        suspicious = [bucket for bucket in bad if bucket not in looked_into]
        if not suspicious:
            break
        sample = choose_more(predictions, scored.select(sample.columns), suspicious, seed)
        looked_into += suspicious
        scored = pl.concat([scored, rescore(sample)], how="diagonal")
    return compare(scored, tolerance, seed)


@dataclass(frozen=True, slots=True)
class _Judged:
    """Which rows of a sample really differ or are near-ties, ``(rows,)`` each; what float32 alone says; differences."""

    bad: np.ndarray
    tie: np.ndarray
    asked: np.ndarray
    exact_bad: np.ndarray
    exact_tie: np.ndarray
    difference: np.ndarray
    exact_difference: np.ndarray
    by_text: np.ndarray


def _judged(scored: pl.DataFrame, tolerance: float) -> _Judged:
    by_text = (
        scored[STAGE].eq(0).fill_null(False).to_numpy() if STAGE in scored.columns else np.zeros(len(scored), bool)
    )
    allowed = np.where(by_text, min(EXACT, tolerance), tolerance)
    difference, bad, tie = _differences(scored, scored[REFERENCE_LOG_PROBS], allowed, scored[REFERENCE_LABEL])
    exact = pl.Series(FLOAT32_LOG_PROBS, [None] * len(scored), dtype=pl.List(pl.Float32))
    exact = scored[FLOAT32_LOG_PROBS] if FLOAT32_LOG_PROBS in scored.columns else exact
    asked = exact.is_not_null().to_numpy()
    exact_difference, exact_bad, exact_tie = _differences(scored.filter(asked), exact.filter(asked), allowed[asked])
    bad[asked] |= exact_bad
    tie[asked] |= exact_tie
    return _Judged(bad, tie & ~bad, asked, exact_bad, exact_tie, difference, exact_difference, by_text)


def compare(scored: pl.DataFrame, tolerance: float, seed: int, *, confidence: float = 0.95) -> SpotCheck:
    """The findings of a spot check.

    If rounding moves each log-probability by at most ``t``, then two scorers can name different labels ``a``
    and ``b`` only where ``(mine[a] - mine[b]) + (theirs[b] - theirs[a]) <= 2 t`` and ``a`` is the likeliest label by its
    own scores: a near-tie, counted apart. What the text alone decided has no rounding to speak of (`EXACT`).

    Args:
        scored: Rows of `choose_sample`, and of `choose_more` where there was a second look, with ``reference_label`` and
            ``reference_log_probs``, and with ``float32_log_probs`` (null where it was not asked) if the run is not in
            float32; first column the id.
        tolerance: ``t``, natural log.
        seed: Of the sample, to be recorded.
        confidence: Of the upper bounds.
    """
    judged = _judged(scored, tolerance)
    outcome = scored.select(BUCKET_INDEX, BUCKET_TICKETS, CHOSEN_FOR, TABLE_TICKETS).with_columns(
        pl.Series("bad", judged.bad, dtype=pl.Boolean), pl.Series("tie", judged.tie, dtype=pl.Boolean)
    )
    drawn = outcome.filter(pl.col(CHOSEN_FOR).is_in([RANDOM, SECOND_LOOK]))
    whole = outcome.filter(pl.col(CHOSEN_FOR) != SUSPICIOUS)
    buckets = _per_bucket(outcome, confidence)
    sampled, disagreed, ties = len(scored), int(judged.bad.sum()), int(judged.tie.sum())
    text_difference = judged.difference[judged.by_text]
    return SpotCheck(
        sampled=sampled,
        agreed=sampled - disagreed - ties,
        near_ties=ties,
        disagreed=disagreed,
        agreement=1 - whole["bad"].sum() / len(whole) if len(whole) else None,
        drawn=len(drawn),
        second_look=SECOND_LOOK in outcome[CHOSEN_FOR],
        near_tie_rate=drawn["tie"].mean(),
        upper_bound=table_bound(outcome, confidence),
        confidence=confidence,
        worst_bucket_agreement=min((1 - row["disagreed"] / row["sampled"] for row in buckets), default=None),
        largest_difference=float(judged.difference.max(initial=0.0)),
        largest_text_difference=float(text_difference.max()) if len(text_difference) else None,
        tolerance=tolerance,
        is_16_bit=tolerance > 100 * EXACT,
        seed=seed,
        float32_sampled=int(judged.asked.sum()),
        float32_near_ties=int(judged.exact_tie.sum()),
        float32_disagreed=int(judged.exact_bad.sum()),
        float32_largest_difference=float(judged.exact_difference.max()) if judged.asked.any() else None,
        per_bucket=tuple(buckets),
        chosen_for=tuple(
            outcome.group_by(CHOSEN_FOR, maintain_order=True)
            .agg(pl.len().alias("sampled"), pl.sum("tie").alias("near_ties"), pl.sum("bad").alias("disagreed"))
            .sort(CHOSEN_FOR)
            .to_dicts()
        ),
        disagreeing_ids=tuple(scored.filter(outcome["bad"])[scored.columns[0]].head(MOST_EXAMPLES).to_list()),
    )


def _differences(
    scored: pl.DataFrame, log_probs: pl.Series, tolerance: np.ndarray, named: pl.Series | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Largest difference of each row in probability from another scorer, and which rows differ or are near-ties.

    Args:
        scored: Rows of the predictions.
        log_probs: The other scorer's, a list of all labels in order a row.
        tolerance: Natural log, one a row.
        named: Labels that the other scorer named; its most probable ones if None.
    """
    labels = [field.name for field in scored.schema[LOG_PROBS].fields]
    mine = scored[LOG_PROBS].struct.unnest().to_numpy().astype(np.float64).reshape(-1, len(labels))
    theirs = log_probs.explode(empty_as_null=False).to_numpy().astype(np.float64).reshape(-1, len(labels))
    index = {label: column for column, label in enumerate(labels)}
    first = np.array([index.get(label, -1) for label in scored[LABEL]], dtype=np.int64)
    best = theirs.argmax(axis=1) if len(theirs) else np.zeros(0, dtype=np.int64)
    second = best if named is None else np.array([index[label] for label in named], dtype=np.int64)
    rows = np.arange(len(scored))
    gap = (mine[rows, first] - mine[rows, second]) + (theirs[rows, second] - theirs[rows, first])
    differs = first != second
    follows = mine[rows, first] >= mine.max(axis=1, initial=-np.inf) - EXACT
    tie = differs & (first >= 0) & follows & (gap <= 2 * tolerance)
    largest = np.nan_to_num(np.abs(np.exp(mine) - np.exp(theirs)), nan=1.0).max(axis=1, initial=0.0)
    return largest, differs & ~tie, tie


def _per_bucket(outcome: pl.DataFrame, confidence: float) -> list[dict]:
    rows = []
    for (bucket,), part in outcome.sort(BUCKET_INDEX, nulls_last=True).group_by(BUCKET_INDEX, maintain_order=True):
        drawn = part.filter(pl.col(CHOSEN_FOR).is_in([RANDOM, COVERING]))
        tickets, ties, bad = part[BUCKET_TICKETS][0], int(part["tie"].sum()), int(part["bad"].sum())
        rows.append(
            {
                "bucket": KNOWN_BEFORE if bucket is None else bucket,
                "tickets": tickets,
                "sampled": len(part),
                "drawn": len(drawn),
                "agreed": len(part) - ties - bad,
                "near_ties": ties,
                "disagreed": bad,
                "upper_bound": upper_bound(int(drawn["bad"].sum()), len(drawn), confidence, population=tickets),
            }
        )
    return rows


def table_bound(outcome: pl.DataFrame, confidence: float = 0.95) -> float:
    """Upper bound of the error rate of the whole table; 1.0 if nothing was drawn.

    There is one draw from each of ``n`` slices of ``m = N // n`` tickets, ``b = N % n`` of which hold one more. If ``q`` is
    the expected share of errors among the draws, that of the table is at most ``(m n q + min(n q, b)) / N``, which is
    hardly more. Independent draws of unequal rates spread less than binomial ones (Hoeffding, Ann. Math. Stat. 27,
    1956), so the bound of Clopper and Pearson holds for ``q``.

    A second look is taken after something was seen, so it has a bound of its own: over the tickets that the first look
    left, the others being known. Both bounds together fail as seldom as ``confidence`` says (Bonferroni), the first
    with four fifths of that chance.

    Args:
        outcome: ``chosen_for``, ``table_tickets`` and ``bad`` of the sampled tickets.
        confidence: Of the bound.
    """
    if outcome.is_empty():
        return 1.0
    tickets = int(outcome[TABLE_TICKETS][0])
    second = outcome.filter(pl.col(CHOSEN_FOR) == SECOND_LOOK)
    first = outcome.filter(~pl.col(CHOSEN_FOR).is_in([SECOND_LOOK, SUSPICIOUS]))
    known, left = int(first["bad"].sum()), tickets - len(first)
    if not left:
        return known / tickets
    chance = 1 - confidence
    if len(second):
        return (
            known + left * _slices_bound(int(second["bad"].sum()), len(second), left, 1 - chance * SECOND_ERROR)
        ) / tickets
    drawn = first.filter(pl.col(CHOSEN_FOR) == RANDOM)
    return _slices_bound(int(drawn["bad"].sum()), len(drawn), tickets, 1 - chance * (1 - SECOND_ERROR))


def bound_without_errors(tickets: int, size: int, confidence: float = 0.95) -> float:
    """What a spot check of ``size`` of ``tickets`` predictions can prove at best."""
    whole = size + -(-size // 4) >= tickets
    return 0.0 if whole else _slices_bound(0, size, tickets, 1 - (1 - confidence) * (1 - SECOND_ERROR))


def _slices_bound(errors: int, drawn: int, tickets: int, confidence: float) -> float:
    if not drawn:
        return 1.0
    rate = upper_bound(errors, drawn, confidence, population=tickets)
    return min(1.0, (tickets // drawn * drawn * rate + min(drawn * rate, tickets % drawn)) / tickets)


def upper_bound(errors: int, drawn: int, confidence: float = 0.95, *, population: int | None = None) -> float:
    """One-sided Clopper-Pearson bound of an error rate, 1.0 if nothing was drawn.

    No errors in n give about ``3 / n`` at 95 %. If the whole population was drawn, its rate is known. Source:
    Clopper and Pearson, Biometrika 26 (1934).
    """
    if drawn and drawn == population:
        return errors / drawn
    if errors >= drawn:
        return 1.0
    return float(beta.ppf(confidence, errors + 1, drawn - errors))
