"""Classification of a frame without Prefect."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import polars as pl
import pytest
import torch

from ticket_engine import classifier, classify, preparation

LABELS = {"billing": "invoices", "delivery": "parcels"}


def test_an_id_column_that_looks_like_a_pattern_is_returned(
    tiny_model: Callable[[str], Path], sample_tickets: pl.DataFrame
) -> None:
    table = sample_tickets.rename({"ticket_id": "^a$"})
    made = classify(table, LABELS, model=str(tiny_model("llama")), id_column="^a$", dtype="float32")
    assert made["^a$"].to_list() == table["^a$"].to_list()


def test_as_many_buckets_run_at_once_as_the_probe_chose_and_the_callers_threads_stay(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real calls, looked at: what the probe chose, and how many workers the pool was given."""
    chosen, pools = [], []
    prepare = preparation.prepare_engine

    def noted(*arguments: object):
        chosen.append(prepare(*arguments))
        return chosen[-1]

    class Pool(ThreadPoolExecutor):
        def __init__(self, max_workers: int) -> None:
            pools.append(max_workers)
            super().__init__(max_workers)

    monkeypatch.setattr(preparation, "prepare_engine", noted)
    monkeypatch.setattr(classifier, "ThreadPoolExecutor", Pool)
    table = pl.DataFrame({"ticket_id": range(60), "body": [f"Where is parcel {n}? " * (1 + n % 9) for n in range(60)]})
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        classify(table, LABELS, model=str(tiny_model("llama")), dtype="float32")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert pools == [spec.workers for spec in chosen]
