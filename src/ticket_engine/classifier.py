"""Classification of a Polars frame without Prefect, for notebooks and services."""

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import polars as pl
import yaml

from ticket_engine.reading import read_tickets
from ticket_engine.schemas import PREDICTIONS_FILE
from ticket_engine.settings import PRODUCTION_MODEL, RunSettings


def classify(
    frame: pl.DataFrame,
    labels: dict[str, str] | str | Path,
    *,
    model: str = PRODUCTION_MODEL,
    id_column: str = "ticket_id",
    text_columns: tuple[str, ...] = ("subject", "body"),
    dtype: str = "auto",
    head: str | Path | None = None,
) -> pl.DataFrame:
    """Predictions for the tickets of a frame, in input order; see `schemas.predictions_schema`.

    The same stages as the flow's, over a temporary folder. Rows that cannot be classified are left out.

    Args:
        frame: One ticket a row.
        labels: Label names with their descriptions, or a labels file.
        model: Hugging Face id, local folder, or ``smollm2-135m``.
        id_column: Unique and not null.
        text_columns: Joined with a line break.
        dtype: Number format, or ``auto``.
        head: Folder made by `python -m flows.fit_labels`.

    Raises:
        UserError: Something in frame, labels or model that the caller can put right.
    """
    from ticket_engine import stages
    from ticket_engine.bucket_scoring import classify_bucket
    from ticket_engine.head_scoring import load_scorer
    from ticket_engine.preparation import prepare_engine

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, store = folder / "input.parquet", folder / "store"
        frame.write_parquet(source)
        if isinstance(labels, dict):
            entries = [{"name": label, "description": text} for label, text in labels.items()]
            labels = folder / "labels.yaml"
            labels.write_text(yaml.safe_dump({"labels": entries}, allow_unicode=True), encoding="utf-8")
        settings = RunSettings(
            input=str(source),
            labels=str(labels),
            output=str(folder / "output"),
            model=model,
            id_column=id_column,
            text_columns=text_columns,
            dtype=dtype,
            head=str(head) if head else None,
        )
        read_tickets(settings.input, folder, id_column=id_column, text_columns=text_columns, limit=None)
        spec = prepare_engine(settings, folder)
        stages.tokenize(folder)
        if head:
            stages.find_scored(folder, store)
            stages.decide_by_text(folder)
        buckets = stages.plan(folder, batch_size=None, max_buckets=settings.max_buckets).buckets
        with _torch_threads_kept(), ThreadPoolExecutor(spec.workers) as pool:
            if buckets:
                load_scorer(folder)
            list(pool.map(lambda bucket: classify_bucket(bucket, folder, store), buckets))
        stages.gather(folder, store, settings.input)
        return pl.read_parquet(folder / PREDICTIONS_FILE, glob=False)


@contextmanager
def _torch_threads_kept() -> Iterator[None]:
    """Give the caller back the number of threads that PyTorch had: passes set their own."""
    import torch

    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
