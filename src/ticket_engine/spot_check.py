"""Which tickets the reference scores again, and what its answers prove.

The sample has two parts. Tickets drawn at random within each bucket (strata) carry the statistics, and a
fault that fills one bucket meets at least one of them. Tickets chosen on purpose (the smallest margins,
the longest and the shortest) look where errors are likely: they count for agreement, but no rate is
inferred from them, since they were not drawn by chance.

Where a run computes in a 16-bit format, a part of the sample is scored in float32 too: the reference in the
run's own format shows that packing and sharing changed nothing, the one in float32 what the format itself does.
"""

import heapq
from dataclasses import dataclass

import numpy as np
import polars as pl
from scipy.stats import beta

from ticket_engine.schemas import BUCKET_INDEX, LABEL, LOG_PROBS, MARGIN, TOKEN_LENGTH

CHOSEN_FOR = "chosen_for"
BUCKET_TICKETS = "bucket_tickets"
IN_FLOAT32 = "in_float32"
REFERENCE_LABEL, REFERENCE_LOG_PROBS, FLOAT32_LOG_PROBS = (
    "reference_label",
    "reference_log_probs",
    "float32_log_probs",
)
LEAST_IN_FLOAT32 = 8
RANDOM, SMALLEST_MARGIN, LONGEST, SHORTEST = "random", "smallest margin", "longest", "shortest"
KNOWN_BEFORE = "known before"  # the stratum of tickets that an earlier run scored
MOST_EXAMPLES = 20


@dataclass(frozen=True, slots=True)
class SpotCheck:
    """What a spot check found.

    Attributes:
        sampled: Tickets scored again.
        agreed: Those with the same label, in float32 too where it was asked.
        near_ties: Those whose label differs only within the tolerance, see `compare`.
        disagreed: Those that really differ, in the run's dtype or in float32.
        agreement: ``1 - disagreed / sampled``; None if none was sampled.
        drawn: Tickets of the sample that were drawn at random.
        upper_bound: With ``confidence``, at most this share of all predictions really differs from the
            reference; inferred from the drawn tickets only.
        confidence: Of each bound.
        worst_bucket_agreement: Lowest agreement of a bucket, None if none was sampled.
        largest_difference: Largest difference of a label's probability; 1 where one is not a number.
        tolerance: Most by which rounding may move a log-probability.
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
    upper_bound: float
    confidence: float
    worst_bucket_agreement: float | None
    largest_difference: float
    tolerance: float
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
            f"at most {self.upper_bound:.1%} of all differ"
            + (f"; {self.float32_sampled} of them asked in float32 too" if self.float32_sampled else "")
        )


def choose_sample(predictions: pl.DataFrame, size: int, seed: int) -> pl.DataFrame:
    """Rows of the predictions to score again, in their order, no row twice.

    ``max(size, buckets)`` tickets are drawn at random, spread over the buckets by `allot`: at least one from
    each. Tickets known from an earlier run are a bucket of their own. On top come up to ``size / 4`` (rounded up)
    that were not drawn: in turn the smallest margin, the longest, the shortest, then more smallest margins.
    A quarter of all, at least 8 where there are so many, is to be scored in float32 too.

    Args:
        predictions: The whole table; rows in a fixed order.
        size: 0 for no sample.
        seed: Same seed and table, same sample.

    Returns:
        The rows with ``chosen_for``, ``bucket_tickets`` (predictions in the row's bucket) and ``in_float32``.
    """
    rows = predictions.select(BUCKET_INDEX, MARGIN, TOKEN_LENGTH).with_row_index("row")
    rows = rows.filter(predictions.to_series(0).is_first_distinct())  # a doubled id is the contract's to report
    chosen: dict[int, str] = {}
    if size and len(rows):
        generator = np.random.default_rng(seed)
        strata = rows.select("row", BUCKET_INDEX).sort(BUCKET_INDEX, "row").partition_by(BUCKET_INDEX)
        for stratum, count in zip(strata, allot([len(stratum) for stratum in strata], size), strict=True):
            chosen |= dict.fromkeys(generator.choice(stratum["row"].to_numpy(), count, replace=False).tolist(), RANDOM)
        chosen |= _on_purpose(rows.filter(~pl.col("row").is_in(list(chosen))), -(-size // 4))
    picked = sorted(chosen)
    tickets = dict(rows.group_by(BUCKET_INDEX).len().iter_rows())
    sample = predictions[picked]
    in_float32 = np.random.default_rng(seed).permutation(len(picked)) < max(LEAST_IN_FLOAT32, -(-len(picked) // 4))
    return sample.with_columns(
        pl.Series(CHOSEN_FOR, [chosen[row] for row in picked], dtype=pl.String),
        pl.Series(BUCKET_TICKETS, [tickets[bucket] for bucket in sample[BUCKET_INDEX]], dtype=pl.UInt32),
        pl.Series(IN_FLOAT32, in_float32, dtype=pl.Boolean),
    )


def _on_purpose(rest: pl.DataFrame, most: int) -> dict[int, str]:
    """Rows where errors are likely, with the reason."""
    margins = rest.sort(MARGIN, "row")["row"].head(most).to_list()
    lengths = rest.sort(TOKEN_LENGTH, "row")["row"]
    order = [(row, SMALLEST_MARGIN) for row in margins]
    order[1:1] = [(lengths[-1], LONGEST), (lengths[0], SHORTEST)] if len(lengths) else []
    chosen: dict[int, str] = {}
    for row, reason in order:
        if len(chosen) < most:
            chosen.setdefault(row, reason)
    return chosen


def allot(sizes: list[int], total: int) -> list[int]:
    """How many to draw from each stratum: ``max(total, strata)`` in all, or everything if there are fewer.

    Each next draw goes to the stratum with the most tickets a draw (Adams' method of apportionment). So every
    stratum has at least one, and the largest ``size / draws``, on which `stratified_bound` depends, is as
    small as it can be.
    """
    counts = [min(1, size) for size in sizes]
    queue = [(-float(size), index) for index, size in enumerate(sizes) if size > 1]
    heapq.heapify(queue)
    for _ in range(min(total, sum(sizes)) - sum(counts)):
        _, index = heapq.heappop(queue)
        counts[index] += 1
        if counts[index] < sizes[index]:
            heapq.heappush(queue, (-sizes[index] / counts[index], index))
    return counts


def compare(scored: pl.DataFrame, tolerance: float, seed: int, *, confidence: float = 0.95) -> SpotCheck:
    """The findings of a spot check.

    If rounding moves each log-probability by at most ``t``, then two scorers can name different labels ``a``
    and ``b`` only where ``(mine[a] - mine[b]) + (theirs[b] - theirs[a]) <= 2 t``: a near-tie, counted apart.

    Args:
        scored: Rows of `choose_sample` with ``reference_label`` and ``reference_log_probs``, and with
            ``float32_log_probs`` (null where it was not asked) if the run is not in float32; first column the id.
        tolerance: ``t``, natural log.
        seed: Of the sample, to be recorded.
        confidence: Of the upper bounds.
    """
    difference, bad, tie = _differences(scored, scored[REFERENCE_LOG_PROBS], tolerance, scored[REFERENCE_LABEL])
    exact = pl.Series(FLOAT32_LOG_PROBS, [None] * len(scored), dtype=pl.List(pl.Float32))
    exact = scored[FLOAT32_LOG_PROBS] if FLOAT32_LOG_PROBS in scored.columns else exact
    asked = exact.is_not_null().to_numpy()
    exact_difference, exact_bad, exact_tie = _differences(scored.filter(asked), exact.filter(asked), tolerance)
    bad[asked] |= exact_bad
    tie[asked] |= exact_tie
    tie &= ~bad
    outcome = scored.select(BUCKET_INDEX, BUCKET_TICKETS, CHOSEN_FOR).with_columns(
        pl.Series("bad", bad, dtype=pl.Boolean),
        pl.Series("tie", tie, dtype=pl.Boolean),
        drawn=pl.col(CHOSEN_FOR) == RANDOM,
    )
    buckets = _per_bucket(outcome, confidence)
    sampled, disagreed = len(scored), int(bad.sum())
    return SpotCheck(
        sampled=sampled,
        agreed=sampled - disagreed - int(tie.sum()),
        near_ties=int(tie.sum()),
        disagreed=disagreed,
        agreement=1 - disagreed / sampled if sampled else None,
        drawn=int(outcome["drawn"].sum()),
        upper_bound=stratified_bound(buckets, confidence),
        confidence=confidence,
        worst_bucket_agreement=min((1 - row["disagreed"] / row["sampled"] for row in buckets), default=None),
        largest_difference=difference,
        tolerance=tolerance,
        seed=seed,
        float32_sampled=int(asked.sum()),
        float32_near_ties=int(exact_tie.sum()),
        float32_disagreed=int(exact_bad.sum()),
        float32_largest_difference=exact_difference if asked.any() else None,
        per_bucket=tuple({name: value for name, value in row.items() if name != "drawn_bad"} for row in buckets),
        chosen_for=tuple(
            outcome.group_by(CHOSEN_FOR, maintain_order=True)
            .agg(pl.len().alias("sampled"), pl.sum("tie").alias("near_ties"), pl.sum("bad").alias("disagreed"))
            .sort(CHOSEN_FOR)
            .to_dicts()
        ),
        disagreeing_ids=tuple(scored.filter(outcome["bad"])[scored.columns[0]].head(MOST_EXAMPLES).to_list()),
    )


def _differences(
    scored: pl.DataFrame, log_probs: pl.Series, tolerance: float, named: pl.Series | None = None
) -> tuple[float, np.ndarray, np.ndarray]:
    """Largest difference in probability from another scorer, and which rows really differ or are near-ties.

    Args:
        scored: Rows of the predictions.
        log_probs: The other scorer's, a list of all labels in order a row.
        tolerance: Natural log.
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
    tie = differs & (first >= 0) & (gap <= 2 * tolerance)
    largest = float(np.nan_to_num(np.abs(np.exp(mine) - np.exp(theirs)), nan=1.0).max(initial=0.0))
    return largest, differs & ~tie, tie


def _per_bucket(outcome: pl.DataFrame, confidence: float) -> list[dict]:
    rows = []
    for (bucket,), part in outcome.sort(BUCKET_INDEX, nulls_last=True).group_by(BUCKET_INDEX, maintain_order=True):
        drawn = part.filter("drawn")
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
                "drawn_bad": int(drawn["bad"].sum()),
                "upper_bound": upper_bound(int(drawn["bad"].sum()), len(drawn), confidence, population=tickets),
            }
        )
    return rows


def stratified_bound(buckets: list[dict], confidence: float = 0.95) -> float:
    """Upper bound of the error rate over all buckets from the tickets drawn in each; 1.0 if none were.

    With ``x`` errors among ``n`` drawn, ``q = sum(n_h p_h) / n`` is the expected error rate of the sample and
    ``p = sum(N_h p_h) / N`` that of the table, so ``p <= r q`` with ``r = max(N_h n / (n_h N))``. The number
    of errors of independent draws with unequal rates spreads less than binomial (Hoeffding, Ann. Math. Stat.
    27, 1956), so the Clopper-Pearson bound of ``q`` holds, and ``r`` times it bounds ``p``. Drawing in
    proportion gives an ``r`` near 1.

    Args:
        buckets: ``tickets`` (``N_h``), ``drawn`` (``n_h``) and ``drawn_bad`` of every bucket of the table.
        confidence: Of the bound.
    """
    drawn, tickets = sum(row["drawn"] for row in buckets), sum(row["tickets"] for row in buckets)
    if not drawn:
        return 1.0
    ratio = max(row["tickets"] * drawn / (row["drawn"] * tickets) for row in buckets)
    bound = upper_bound(sum(row["drawn_bad"] for row in buckets), drawn, confidence, population=tickets)
    return min(1.0, ratio * bound)


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
