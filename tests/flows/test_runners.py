"""The Dask runner: two local worker processes give the predictions that threads give."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("prefect_dask") is None, reason="prefect-dask is not installed")
@pytest.mark.filterwarnings("ignore")
def test_dask_workers_give_the_same_predictions_as_threads(
    run_cli: Run, sample_tickets: pl.DataFrame, tmp_path: Path
) -> None:
    source = tmp_path / "tickets.parquet"
    table = pl.concat([sample_tickets.with_columns(pl.col("ticket_id").cast(pl.String) + f"-{n}") for n in range(4)])
    table.with_columns(body=pl.col("body") + " " + pl.col("ticket_id")).write_parquet(source)
    outputs = {}
    for runner in ("threads", "dask"):
        outputs[runner] = tmp_path / runner / "out"
        code, _, errors = run_cli(input=source, output=outputs[runner], runner=runner, workers=2, batch_size=2)
        assert code == 0, errors
    frames = {name: pl.read_parquet(output / "predictions.parquet") for name, output in outputs.items()}
    assert (
        frames["dask"]
        .drop("log_probs", "probability", "margin")
        .equals(frames["threads"].drop("log_probs", "probability", "margin"))
    )
    assert (frames["dask"]["probability"] - frames["threads"]["probability"]).abs().max() < 1e-4
    assert json.loads((outputs["dask"] / "manifest.json").read_text())["plan"]["buckets"] > 2
