"""Which tickets the reference scores again, and what its answers prove.

The sample has two parts. Tickets drawn at random within each bucket (strata) carry the statistics: a
fault that hits one bucket meets at least one sampled ticket there. Tickets chosen on purpose, the
smallest margins and the shortest and longest tickets, look where errors are likely; they count for
agreement, but no rate is inferred from them.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl
from scipy.stats import beta

from ticket_engine.schemas import BUCKET_INDEX, LABEL, LOG_PROBS, MARGIN, TOKEN_LENGTH

CHOSEN_FOR = "chosen_for"
RANDOM = "random"
MOST_EXAMPLES = 20


@dataclass(frozen=True, slots=True)
class SpotCheck:
    """What a spot check found.

    Attributes:
        sampled: Tickets scored again.
        agreed: Those with the same label.
        near_ties: Those whose label differs, but whose log-probabilities of the two labels lie within
            twice the tolerance of each other: rounding may decide either way.
        disagreed: Those that really differ.
        agreement: ``(sampled - disagreed) / sampled``, 1.0 for an empty sample.
        random: Tickets of the sample that were drawn at random.
        upper_bound: With ``confidence``, at most this share of all tickets differs (Clopper-Pearson on
            the random part; near-ties do not count).
        confidence: Of the bound.
        largest_difference: Largest difference of a label's probability.
        tolerance: In log-probability.
        seed: Of the sample.
        per_bucket: A row a bucket: ``bucket``, ``sampled``, ``disagreed``, ``upper_bound``.
        disagreeing_ids: Examples.
    """

    sampled: int
    agreed: int
    near_ties: int
    disagreed: int
    agreement: float
    random: int
    upper_bound: float
    confidence: float
    largest_difference: float
    tolerance: float
    seed: int
    per_bucket: tuple[dict, ...]
    disagreeing_ids: tuple

    def one_line(self) -> str:
        """For a log."""
        return (
            f"{self.agreed} of {self.sampled} agree, {self.near_ties} near-ties, {self.disagreed} disagree; "
            f"at most {self.upper_bound:.1%} of all differ"
        )


def choose_sample(predictions: pl.DataFrame, size: int, seed: int) -> pl.DataFrame:
    """Rows of the predictions to score again, with ``chosen_for`` behind them; no row twice.

    ``size`` tickets are drawn at random, spread over the buckets in proportion and at least one a
    bucket (so more than ``size`` where there are more buckets). A quarter of ``size`` again goes to the
    smallest margins, and the shortest and the longest ticket are added. Tickets known from an earlier
    run form a bucket of their own.

    Args:
        predictions: The whole table.
        size: 0 for no sample.
        seed: Same seed and table, same sample.
    """
    rows = predictions.with_row_index("row")
    if not size or not len(rows):
        return predictions.clear().with_columns(pl.lit(None, pl.String).alias(CHOSEN_FOR))
    generator = np.random.default_rng(seed)
    random_rows = []
    strata = rows.select("row", BUCKET_INDEX).partition_by(BUCKET_INDEX, maintain_order=True)
    for stratum, count in zip(strata, _shares([len(stratum) for stratum in strata], size), strict=True):
        random_rows += generator.choice(stratum["row"].to_numpy(), count, replace=False).tolist()
    chosen = dict.fromkeys(random_rows, RANDOM)
    for row in rows.sort(MARGIN, "row")["row"].head(-(-size // 4)).to_list():
        chosen.setdefault(row, "smallest margin")
    by_length = rows.sort(TOKEN_LENGTH, "row")["row"]
    chosen.setdefault(by_length[0], "shortest")
    chosen.setdefault(by_length[-1], "longest")
    picked = pl.DataFrame({"row": list(chosen), CHOSEN_FOR: list(chosen.values())}, schema_overrides={"row": pl.UInt32})
    return rows.join(picked, on="row", how="inner", validate="1:1").drop("row")


def _shares(sizes: list[int], total: int) -> list[int]:
    """``total`` spread over strata in proportion to their sizes, at least 1 and at most all of each."""
    whole = sum(sizes)
    exact = [min(size, max(1.0, total * size / whole)) for size in sizes]
    counts = [int(value) for value in exact]
    by_rest = sorted(range(len(sizes)), key=lambda index: exact[index] - counts[index], reverse=True)
    for index in by_rest:
        if sum(counts) >= total:
            break
        counts[index] = min(sizes[index], counts[index] + 1)
    return counts


def compare(scored: pl.DataFrame, tolerance: float, seed: int, *, confidence: float = 0.95) -> SpotCheck:
    """The findings of a spot check.

    Args:
        scored: The sample with ``reference_label`` and ``reference_log_probs``; first column the id.
        tolerance: Most by which a log-probability may differ through rounding.
        seed: Of the sample, to be recorded.
        confidence: Of the upper bound.
    """
    labels = [field.name for field in scored.schema[LOG_PROBS].fields]
    mine = scored[LOG_PROBS].struct.unnest().to_numpy().reshape(-1, len(labels))
    theirs = scored["reference_log_probs"].explode().to_numpy().reshape(-1, len(labels))
    index = {label: column for column, label in enumerate(labels)}
    first = np.array([index.get(label, -1) for label in scored[LABEL]], dtype=np.int64)
    second = np.array([index[label] for label in scored["reference_label"]], dtype=np.int64)
    rows = np.arange(len(scored))
    differs = first != second
    gap = np.maximum(np.abs(mine[rows, first] - mine[rows, second]), np.abs(theirs[rows, first] - theirs[rows, second]))
    tie = differs & (first >= 0) & (gap <= 2 * tolerance)
    bad = differs & ~tie
    drawn = (scored[CHOSEN_FOR] == RANDOM).to_numpy()
    outcome = scored.select(BUCKET_INDEX).with_columns(pl.Series("bad", bad), pl.Series("drawn", drawn))
    return SpotCheck(
        sampled=len(scored),
        agreed=int((~differs).sum()),
        near_ties=int(tie.sum()),
        disagreed=int(bad.sum()),
        agreement=1 - float(bad.mean()) if len(scored) else 1.0,
        random=int(drawn.sum()),
        upper_bound=upper_bound(int((bad & drawn).sum()), int(drawn.sum()), confidence),
        confidence=confidence,
        largest_difference=float(np.abs(np.exp(mine) - np.exp(theirs)).max()) if len(scored) else 0.0,
        tolerance=tolerance,
        seed=seed,
        per_bucket=_per_bucket(outcome, confidence),
        disagreeing_ids=tuple(scored.filter(pl.Series(bad))[scored.columns[0]].head(MOST_EXAMPLES).to_list()),
    )


def _per_bucket(outcome: pl.DataFrame, confidence: float) -> tuple[dict, ...]:
    rows = []
    for (bucket,), part in sorted(
        outcome.partition_by(BUCKET_INDEX, as_dict=True).items(), key=lambda item: (item[0][0] is None, item[0][0])
    ):
        drawn = part.filter("drawn")
        bound = upper_bound(int(drawn["bad"].sum()), len(drawn), confidence)
        name = "known before" if bucket is None else bucket
        rows.append({"bucket": name, "sampled": len(part), "disagreed": int(part["bad"].sum()), "upper_bound": bound})
    return tuple(rows)


def upper_bound(errors: int, size: int, confidence: float = 0.95) -> float:
    """One-sided Clopper-Pearson bound of an error rate, 1.0 for an empty sample.

    No errors in n give about ``3 / n`` at 95 %. Source: Clopper and Pearson, Biometrika 26 (1934).
    """
    if size == 0 or errors >= size:
        return 1.0
    return float(beta.ppf(confidence, errors + 1, size - errors))
