import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from ticket_engine import stages
from ticket_engine.bucket_files import Bucket, read_bucket
from ticket_engine.bucket_scoring import classify_bucket
from ticket_engine.engine import load_engine
from ticket_engine.engine_spec import read_spec
from ticket_engine.parts import part_path, read_part

TEXTS = [
    "Where is my order? It was due on Monday.",
    "I was charged twice.",
    "Refund?",
    "I cannot log in to my account since the update, the reset mail never comes.",
    "The shoes are too small.",
    "Please close my account.",
]
POISON = "Straße"


@pytest.fixture
def bucket_of(make_run: Callable[..., Path]) -> Callable[..., tuple[Path, Bucket]]:
    """A run's folder and its only bucket."""

    def make(texts: list[str], **settings: object) -> tuple[Path, Bucket]:
        folder = make_run(texts, token_budget=60, **settings)
        stages.tokenize(folder)
        plan = stages.plan(folder, batch_size=None, max_buckets=1)
        assert plan.batches > 1
        return folder, plan.buckets[0]

    return make


def read_scores(folder: Path, bucket: Bucket, store: Path) -> pl.DataFrame:
    spec = read_spec(folder)
    part = read_part(part_path(store, spec.score_key, bucket.content_key), spec.score_key)
    assert part is not None
    return part


def test_a_bucket_becomes_one_part_with_the_engines_scores_of_every_ticket(
    bucket_of: Callable[..., tuple[Path, Bucket]], tmp_path: Path
) -> None:
    folder, bucket = bucket_of(TEXTS)
    result = classify_bucket(bucket, folder, tmp_path)
    assert (result.index, result.tickets, result.tokens) == (0, len(TEXTS), bucket.real_tokens)
    assert (result.failed, result.reused) == (0, False)
    assert result.seconds > 0
    part, tickets = read_scores(folder, bucket, tmp_path), read_bucket(bucket.path)
    engine = load_engine(folder)
    made = dict(zip(part["ticket_key"], part["log_probs"].to_numpy(), strict=True))
    assert len(made) == len(TEXTS)
    for key, ids in zip(tickets["ticket_key"], tickets["token_ids"], strict=True):
        np.testing.assert_allclose(made[key], engine.reference(ids.to_numpy()), atol=1e-4)


def test_a_part_that_is_there_is_not_computed_again_and_one_that_is_damaged_is(
    bucket_of: Callable[..., tuple[Path, Bucket]], tmp_path: Path
) -> None:
    folder, bucket = bucket_of(TEXTS)
    classify_bucket(bucket, folder, tmp_path)
    (path,) = tmp_path.rglob("*.parquet")
    before = path.read_bytes(), path.stat().st_mtime_ns
    assert classify_bucket(bucket, folder, tmp_path).reused
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    path.write_bytes(before[0][:-40])
    assert not classify_bucket(bucket, folder, tmp_path).reused
    assert path.read_bytes() == before[0]


def test_a_ticket_whose_scores_are_not_finite_gets_a_reason_and_its_neighbours_their_scores(
    bucket_of: Callable[..., tuple[Path, Bucket]],
    poisoned_model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder, bucket = bucket_of([*TEXTS, f"{POISON} gesperrt"], model=poisoned_model)
    with caplog.at_level(logging.WARNING):
        result = classify_bucket(bucket, folder, tmp_path)
    assert (result.tickets, result.failed) == (7, 1)
    part = read_scores(folder, bucket, tmp_path)
    bad = part.filter(pl.col("reason").is_not_null())
    assert bad["reason"].to_list() == ["scores are not finite"]
    assert np.isnan(bad["log_probs"].to_numpy()).all()
    good = part.filter(pl.col("reason").is_null())["log_probs"].to_numpy()
    np.testing.assert_allclose(np.exp(good).sum(1), 1, atol=1e-6)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("A batch of")
    assert POISON not in line
    assert classify_bucket(bucket, folder, tmp_path).failed == 1
