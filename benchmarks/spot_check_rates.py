"""How often a spot check with the default limits errs, by simulation: `python -m benchmarks.spot_check_rates --write`.

The sample, the second look, the bound and the contract are the real ones; only the slow scorer is replaced by a list of
the tickets that differ.
"""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import polars as pl

from data_contracts.agreement import ExpectSpotCheckToAgree
from ticket_engine.settings import RunSettings
from ticket_engine.spot_check import SpotCheck, check_predictions

PAGE = Path(__file__).parents[1] / "docs" / "contracts.md"
SUITE = Path(__file__).parents[1] / "data_contracts" / "predictions.json"
TICKETS, SIZE, TOLERANCE = 25_600, RunSettings.model_fields["spot_check"].default, 1e-4
LAYOUTS = {
    "1 bucket": (1, 0.0),
    "32 buckets": (32, 0.0),
    "256 buckets": (256, 0.0),
    "half known, 128 buckets": (128, 0.5),
}
FALSE_RATE = 0.003


def make_table(buckets: int, known: float) -> pl.DataFrame:
    """Figures of predictions of two labels in equal buckets, a share of them known before."""
    old = int(TICKETS * known)
    bucket = [None] * old + (np.arange(TICKETS - old) * buckets // (TICKETS - old)).tolist()
    scores = pl.struct(yes=pl.lit(np.log(0.9)), no=pl.lit(np.log(0.1)))
    return pl.DataFrame({"ticket_id": np.arange(TICKETS)}).with_columns(
        pl.Series("bucket_index", bucket, dtype=pl.UInt32),
        pl.lit(0.8).alias("margin"),
        pl.Series("token_length", np.arange(TICKETS, 0, -1)),
        pl.lit("yes").alias("label"),
        scores.alias("log_probs"),
    )


def checked(table: pl.DataFrame, wrong: np.ndarray, seed: int) -> SpotCheck:
    """The spot check of a table of whose tickets some differ; probabilities are left out of it."""

    def rescore(sample: pl.DataFrame) -> pl.DataFrame:
        differs = pl.Series(wrong[sample["row"].to_numpy()])
        swapped = pl.struct(yes=pl.col("log_probs").struct.field("no"), no=pl.col("log_probs").struct.field("yes"))
        theirs = sample.select(pl.when(differs).then(swapped).otherwise("log_probs").struct.unnest())
        return sample.with_columns(
            pl.Series("reference_label", np.where(differs, "no", "yes"), dtype=pl.String),
            theirs.select(pl.concat_list("yes", "no").alias("reference_log_probs")).to_series(),
        )

    return check_predictions(table, SIZE, seed, tolerance=TOLERANCE, rescore=rescore)


def judge() -> Callable[[SpotCheck], bool]:
    """Whether the agreement contract with its defaults holds; differences of probabilities are not judged here."""
    limits = json.loads(SUITE.read_text(encoding="utf-8"))["meta"]["parameters"]
    limits = {name: limits[name] for name in ("min_bucket_agreement", "max_disagreement")}
    least = RunSettings.model_fields["min_agreement"].default
    return lambda check: ExpectSpotCheckToAgree(spot_check=asdict(check), min_agreement=least, **limits).judge()[0]


def rows(rounds: int) -> list[str]:
    """A line of the table a layout."""
    holds, lines = judge(), []
    for name, (buckets, known) in LAYOUTS.items():
        table = make_table(buckets, known)
        bucket = table["bucket_index"].fill_null(buckets).to_numpy()
        rng = np.random.default_rng(0)
        refused, missed, missed_half, looks = 0, 0, 0, 0
        for seed in range(rounds):
            check = checked(table, rng.random(TICKETS) < FALSE_RATE, seed)
            refused, looks = refused + (not holds(check)), looks + check.second_look
            bad = bucket == rng.integers(buckets)
            missed += holds(checked(table, bad, seed))
            missed_half += holds(checked(table, bad & (rng.random(TICKETS) < 0.5), seed))
        clean = checked(table, np.zeros(TICKETS, dtype=bool), 0)
        shares = [f"{count / rounds:.1%}" for count in (refused, looks, missed, missed_half)]
        lines.append(f"| {name} | {' | '.join(shares)} | {clean.sampled} | {clean.upper_bound:.1%} |")
    return lines


def main() -> None:
    """Print the table, or write it into docs/contracts.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    head = (
        f"| {TICKETS:,} tickets in | refused at {FALSE_RATE:.1%} | second look then | one bucket wrong, published | "
        "half of one bucket wrong, published | tickets scored again, clean run | its bound |"
    )
    text = "\n".join([head, "|---|---:|---:|---:|---:|---:|---:|", *rows(given.rounds)])
    print(text)
    if given.write:
        page = PAGE.read_text(encoding="utf-8")
        made = f"<!-- rates: begin -->\n{given.rounds} simulated runs each:\n\n{text}\n<!-- rates: end -->"
        page = re.sub(r"<!-- rates: begin -->.*<!-- rates: end -->", lambda _: made, page, flags=re.S)
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
