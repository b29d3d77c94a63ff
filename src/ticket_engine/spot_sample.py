"""Which tickets the reference scores again.

The table is laid out bucket after bucket and cut into as many equal slices as tickets are to be drawn; one ticket is
drawn from each slice, each by itself (stratified sampling with one unit a stratum: Cochran, Sampling Techniques, ch.
5A). So every ticket has the same chance, whatever the number of buckets, and these draws carry the statistics::

    known before ........... | bucket 0 ....... | bucket 1 ... | bucket 2 ..
    slice 1 | slice 2 | slice 3 | slice 4 | slice 5 | slice 6 | slice 7 |

On top come tickets that no rate is inferred from: one of each bucket that no draw met, so that a fault that fills a
bucket is met for certain, and tickets chosen on purpose where errors are likely. Only if one of all these disagrees is
there a second look: more of the whole table and more of each bucket in which it happened, before anything is judged.
"""

import numpy as np
import polars as pl

from ticket_engine.schemas import BUCKET_INDEX, MARGIN, TOKEN_LENGTH

ROW, CHOSEN_FOR, IN_FLOAT32 = "row", "chosen_for", "in_float32"
BUCKET_TICKETS, TABLE_TICKETS = "bucket_tickets", "table_tickets"
RANDOM, COVERING, SECOND_LOOK, SUSPICIOUS = "random", "bucket not met yet", "second look", "suspicious bucket"
SMALLEST_MARGIN, LONGEST, SHORTEST = "smallest margin", "longest", "shortest"
LEAST_IN_FLOAT32 = 8
SECOND_LOOK_TIMES = (
    16  # as many times the first draws; at a true rate of 0.3 % one run in 200 is refused (docs/contracts.md)
)
MORE_OF_A_BUCKET = 12
MOST_SUSPICIOUS = 8  # buckets; where more are, the second look over the whole table shows it


def choose_sample(predictions: pl.DataFrame, size: int, seed: int) -> pl.DataFrame:
    """Rows of the predictions to score again at first, in their order, no row twice.

    ``size`` tickets are drawn at random, then one of each bucket that has none of them (tickets known from an earlier
    run are a bucket of their own). On top come up to ``size / 4`` (rounded up) that were not drawn: in turn the
    smallest margin, the longest, the shortest, then more smallest margins. A quarter of all, at least 8 where there are
    so many, is to be scored in float32 too.

    Args:
        predictions: All rows in a fixed order: the id first, ``bucket_index``, ``margin``, ``token_length`` and any
            others.
        size: 0 for no sample.
        seed: Same seed and table, same sample.

    Returns:
        The rows with ``row`` (place in the table), ``chosen_for``, ``bucket_tickets`` (predictions in the row's
        bucket), ``table_tickets`` (all) and ``in_float32``.
    """
    rows = _rows(predictions)
    chosen: dict[int, str] = {}
    if size and len(rows):
        generator = np.random.default_rng(seed)
        chosen |= dict.fromkeys(_one_a_slice(rows[ROW].to_numpy(), size, generator), RANDOM)
        met = rows.filter(pl.col(ROW).is_in(list(chosen))).select(BUCKET_INDEX).unique()
        rest = rows.join(met, on=BUCKET_INDEX, how="anti", nulls_equal=True, maintain_order="left")
        for part in rest.partition_by(BUCKET_INDEX, maintain_order=True):
            chosen[int(generator.choice(part[ROW].to_numpy()))] = COVERING
        chosen |= _on_purpose(rows.filter(~pl.col(ROW).is_in(list(chosen))), -(-size // 4))
    return _described(predictions, rows, chosen, seed)


def choose_more(
    predictions: pl.DataFrame, sample: pl.DataFrame, suspicious: list[int | None], seed: int
) -> pl.DataFrame:
    """The second look: rows that are not in the sample, in the form of `choose_sample`.

    Args:
        predictions: As for the sample.
        sample: All that was chosen so far; the whole table is looked at a second time only once.
        suspicious: ``bucket_index`` of sampled tickets that disagree, each once.
        seed: The sample's.
    """
    rows, generator = _rows(predictions), np.random.default_rng((seed, len(sample)))
    left = rows.filter(~pl.col(ROW).is_in(sample[ROW].implode()))
    drawn = 0 if SECOND_LOOK in sample[CHOSEN_FOR] else int((sample[CHOSEN_FOR] == RANDOM).sum())
    chosen = dict.fromkeys(_one_a_slice(left[ROW].to_numpy(), SECOND_LOOK_TIMES * drawn, generator), SECOND_LOOK)
    left = left.filter(~pl.col(ROW).is_in(list(chosen)))
    for bucket in suspicious[:MOST_SUSPICIOUS]:
        inside = left.filter(pl.col(BUCKET_INDEX).eq_missing(pl.lit(bucket, pl.UInt32)))[ROW].to_numpy()
        picked = generator.choice(inside, min(MORE_OF_A_BUCKET, len(inside)), replace=False)
        chosen |= dict.fromkeys(picked.tolist(), SUSPICIOUS)
    return _described(predictions, rows, chosen, seed)


def _rows(predictions: pl.DataFrame) -> pl.DataFrame:
    """Place, bucket, margin and length of each ticket, bucket after bucket."""
    rows = predictions.select(BUCKET_INDEX, MARGIN, TOKEN_LENGTH).with_row_index(ROW)
    rows = rows.filter(predictions.to_series(0).is_first_distinct())  # a doubled id is the contract's to report
    return rows.sort(BUCKET_INDEX, ROW)


def _one_a_slice(places: np.ndarray, count: int, generator: np.random.Generator) -> list[int]:
    """One place of each of ``count`` slices of nearly equal size; all of them if there are no more."""
    count = min(count, len(places))
    edges = np.arange(count + 1) * len(places) // max(count, 1)
    return places[generator.integers(edges[:-1], edges[1:])].tolist() if count else []


def _on_purpose(rest: pl.DataFrame, most: int) -> dict[int, str]:
    """Rows where errors are likely, with the reason."""
    margins = rest.sort(MARGIN, ROW)[ROW].head(most).to_list()
    lengths = rest.sort(TOKEN_LENGTH, ROW)[ROW]
    order = [(row, SMALLEST_MARGIN) for row in margins]
    order[1:1] = [(lengths[-1], LONGEST), (lengths[0], SHORTEST)] if len(lengths) else []
    chosen: dict[int, str] = {}
    for row, reason in order:
        if len(chosen) < most:
            chosen.setdefault(row, reason)
    return chosen


def _described(predictions: pl.DataFrame, rows: pl.DataFrame, chosen: dict[int, str], seed: int) -> pl.DataFrame:
    picked = sorted(chosen)
    tickets = dict(rows.group_by(BUCKET_INDEX).len().iter_rows())
    sample = predictions[picked]
    in_float32 = np.random.default_rng(seed).permutation(len(picked)) < max(LEAST_IN_FLOAT32, -(-len(picked) // 4))
    return sample.with_columns(
        pl.Series(ROW, picked, dtype=pl.UInt32),
        pl.Series(CHOSEN_FOR, [chosen[row] for row in picked], dtype=pl.String),
        pl.Series(BUCKET_TICKETS, [tickets[bucket] for bucket in sample[BUCKET_INDEX]], dtype=pl.UInt32),
        pl.lit(len(rows), pl.UInt32).alias(TABLE_TICKETS),
        pl.Series(IN_FLOAT32, in_float32, dtype=pl.Boolean),
    )
