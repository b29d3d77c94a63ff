from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ticket_engine.bucket_files import CHUNK_ROWS, bucket_path, read_bucket, write_buckets
from ticket_engine.bucketing import PlanRule
from ticket_engine.parts import content_key
from ticket_engine.store import empty_scores

PACKED = PlanRule(padded=False, token_budget=100)


def write_tokens(path: Path, texts: list[tuple[int, int]]) -> pl.DataFrame:
    """A tokens table; a text is ``(length, which)``, equal texts have equal keys and ids."""
    frame = pl.DataFrame(
        {
            "ticket_id": [f"t{row}" for row in range(len(texts))],
            "input_index": pl.Series(range(len(texts)), dtype=pl.UInt32),
            "ticket_key": [b"%08d-%06d" % text for text in texts],
            "token_length": pl.Series([length for length, _ in texts], dtype=pl.UInt32),
            "is_truncated": [False] * len(texts),
            "token_ids": pl.Series([[which] * length for length, which in texts], dtype=pl.List(pl.UInt32)),
        },
        schema_overrides={"ticket_id": pl.String, "ticket_key": pl.Binary, "is_truncated": pl.Boolean},
    )
    frame.write_parquet(path)
    return frame


@given(
    texts=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), max_size=60),
    padded=st.booleans(),
    max_buckets=st.integers(1, 5),
    known=st.sets(st.integers(0, 59), max_size=20),
)
@settings(deadline=None, max_examples=40)
def test_every_distinct_ticket_that_is_not_known_is_in_one_bucket_with_its_ids(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[tuple[int, int]],
    padded: bool,
    max_buckets: int,
    known: set[int],
) -> None:
    folder = tmp_path_factory.mktemp("buckets")
    tokens = write_tokens(folder / "tokens.parquet", texts)
    known_keys = {tokens["ticket_key"][row] for row in known if row < len(tokens)}
    scored = pl.DataFrame({"ticket_key": sorted(known_keys)}, schema={"ticket_key": pl.Binary})
    rule = PlanRule(padded, token_budget=120, extra_tokens=2)
    plan = write_buckets(folder / "tokens.parquet", scored, folder / "buckets", rule, max_buckets)

    frames = [read_bucket(bucket.path) for bucket in plan.buckets]
    seen = [row for frame in frames for row in frame.select("ticket_key", "token_ids").rows()]
    expected = dict(zip(tokens["ticket_key"], tokens["token_ids"].to_list(), strict=True))
    assert sorted(key for key, _ in seen) == sorted(set(expected) - known_keys)
    assert all(ids == expected[key] for key, ids in seen)

    assert len(plan.buckets) <= max_buckets
    assert (plan.tickets, plan.distinct, plan.stored) == (len(texts), len(expected), len(known_keys))
    batches = [batch for frame in frames for batch in frame.partition_by("batch_index", maintain_order=True)]
    assert plan.batches == len(batches)
    for batch in batches:
        widths = batch["token_length"].to_numpy() + 2
        assert (np.diff(widths.astype(int)) <= 0).all()
        assert len(batch) == 1 or (len(batch) * widths[0] if padded else widths.sum()) <= 120
    real = sum(len(ids) + 2 for _, ids in seen)
    positions = sum(len(batch) * (batch["token_length"].max() + 2) for batch in batches) if padded else real
    assert (plan.real_positions, plan.positions) == (real, positions)
    assert plan.padding_overhead == pytest.approx(positions / real - 1 if real else 0)


def test_buckets_describe_their_files_and_come_longest_first(tmp_path: Path) -> None:
    texts = [(length, 0) for length in np.random.default_rng(1).permutation(np.arange(1, 61)).tolist()]
    write_tokens(tmp_path / "tokens.parquet", texts)
    plan = write_buckets(tmp_path / "tokens.parquet", empty_scores(), tmp_path / "buckets", PACKED, 4)
    assert [bucket.index for bucket in plan.buckets] == [0, 1, 2, 3]
    assert plan.buckets[0].longest == 60
    for bucket, after in zip(plan.buckets, plan.buckets[1:], strict=False):
        assert bucket.shortest >= after.longest
    for bucket in plan.buckets:
        assert bucket.path == str(bucket_path(tmp_path / "buckets", bucket.index))
        frame = read_bucket(bucket.path)
        assert bucket.content_key == content_key(frame["ticket_key"].to_list())
        assert (bucket.tickets, bucket.real_tokens) == (len(frame), frame["token_length"].sum())
        assert bucket.batches == frame["batch_index"].n_unique()
    assert "buckets" in plan.summary()
    assert plan.summary()["buckets"] == 4


def test_the_plan_reports_what_fixed_batches_and_padding_to_the_longest_would_cost(tmp_path: Path) -> None:
    lengths = [10] * 32 + [4] * 31 + [2]
    write_tokens(tmp_path / "tokens.parquet", [(length, row) for row, length in enumerate(lengths)])
    plan = write_buckets(tmp_path / "tokens.parquet", empty_scores(), tmp_path / "buckets", PACKED, 4)
    real = sum(lengths)
    assert plan.padding_overhead == 0
    assert plan.padding_overhead_published == pytest.approx((32 * 10 + 32 * 4) / real - 1)
    assert plan.padding_overhead_longest == pytest.approx(64 * 10 / real - 1)


def test_a_table_of_several_chunks_reaches_its_buckets_whole(tmp_path: Path) -> None:
    lengths = np.random.default_rng(2).integers(1, 6, 2 * CHUNK_ROWS + 100).tolist()
    tokens = write_tokens(tmp_path / "tokens.parquet", [(length, row) for row, length in enumerate(lengths)])
    rule = PlanRule(padded=False, token_budget=1000)
    plan = write_buckets(tmp_path / "tokens.parquet", empty_scores(), tmp_path / "buckets", rule, 7)
    frames = pl.concat([read_bucket(bucket.path).select("ticket_key", "token_ids") for bucket in plan.buckets])
    assert frames.sort("ticket_key").equals(tokens.select("ticket_key", "token_ids").sort("ticket_key"))
    assert len(plan.buckets) == 7


def test_a_table_that_is_empty_or_wholly_known_has_no_buckets(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens.parquet", [])
    plan = write_buckets(tmp_path / "tokens.parquet", empty_scores(), tmp_path / "buckets", PACKED, 4)
    assert (plan.buckets, plan.tickets, plan.batches, plan.padding_overhead) == ((), 0, 0, 0.0)
    tokens = write_tokens(tmp_path / "tokens.parquet", [(3, 0), (4, 0)])
    plan = write_buckets(tmp_path / "tokens.parquet", tokens.select("ticket_key"), tmp_path / "buckets", PACKED, 4)
    assert (plan.buckets, plan.tickets, plan.stored, plan.batches) == ((), 2, 2, 0)
