"""A run's working folder made from real tickets, with scores drawn at random in place of a model."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from ticket_engine.labels import keep_labels, read_labels
from ticket_engine.ownership import RUN, mark
from ticket_engine.publish import write_manifest
from ticket_engine.reading import ReadSummary, quarantine_late, read_tickets
from ticket_engine.results import decide
from ticket_engine.schemas import LABEL, LOG_PROBS, PREDICTIONS_FILE, QUARANTINE_FILE, predictions_schema
from ticket_engine.settings import RunSettings
from ticket_engine.spot_check import SpotCheck, compare
from ticket_engine.spot_sample import choose_sample

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data" / "tickets"
BUCKET_ROWS = 200


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run's folder, before its contracts."""

    folder: Path
    settings: RunSettings
    summary: ReadSummary
    checked: SpotCheck

    def predictions(self) -> pl.DataFrame:
        return pl.read_parquet(self.folder / PREDICTIONS_FILE)

    def with_predictions(self, frame: pl.DataFrame) -> "Run":
        frame.write_parquet(self.folder / PREDICTIONS_FILE)
        return self

    def quarantine(self) -> pl.DataFrame:
        return pl.read_parquet(self.folder / QUARANTINE_FILE)

    def with_settings(self, **changes: object) -> "Run":
        return replace(self, settings=self.settings.model_copy(update=changes))


@pytest.fixture(scope="session")
def shared_tickets() -> Path:
    """The folder of real tickets; tests are skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared/data/tickets here")
    return SHARED


@pytest.fixture
def finished_run(tmp_path: Path, shared_tickets: Path) -> Callable[..., Run]:
    """``finished_run(name, rows=None, bad_rows=0)``: a run over a real set.

    The first ``bad_rows`` rows lose their text, and after reading two tickets are rejected late. An empty table
    comes from ``rows=0``.
    """

    def make(name: str = "multidogo_chats", *, rows: int | None = None, bad_rows: int = 0) -> Run:
        folder = tmp_path / "work"
        folder.mkdir()
        source = tmp_path / "input.parquet"
        table = pl.read_parquet(shared_tickets / f"{name}.dev.parquet")
        table = table if rows is None else table.head(rows)
        blank = pl.int_range(pl.len()) < bad_rows
        table = table.with_columns(pl.when(~blank).then(column).alias(column) for column in ("subject", "body"))
        table.write_parquet(source)
        settings = RunSettings(
            input=str(source),
            labels=str(shared_tickets / f"{name}.labels.yaml"),
            output=str(tmp_path / "out"),
            run_date="2026-12-01",
        )
        summary = read_tickets(
            str(source), folder, id_column="ticket_id", text_columns=settings.text_columns, limit=None
        )
        _tokenize(folder)
        quarantine_late(str(source), folder, folder / "failed.parquet")
        keep_labels(read_labels(settings.labels), folder)
        labels = read_labels(settings.labels).names
        predictions = made_predictions(pl.read_parquet(folder / "tokens.parquet"), labels)
        predictions.write_parquet(folder / PREDICTIONS_FILE)
        checked = compare(answers(choose_sample(predictions, 32, 0)), 1e-4, 0)
        return Run(folder, settings, summary, checked)

    return make


def _tokenize(folder: Path) -> None:
    """Tokens and late rejections as the tokenizer leaves them, with lengths from white space."""
    tickets = pl.read_parquet(folder / "tickets.parquet")
    length = pl.col("text").str.split(" ").list.len().cast(pl.UInt32)
    tokens = tickets.with_columns(length.alias("token_length"), is_truncated=length > 400).drop("text")
    late = tokens.slice(5, 2)
    late.select("input_index", pl.lit("text merges with the prompt").alias("reason")).write_parquet(
        folder / "failed.parquet"
    )
    tokens.filter(~pl.col("input_index").is_in(late["input_index"].implode())).write_parquet(folder / "tokens.parquet")


def made_predictions(tokens: pl.DataFrame, labels: tuple[str, ...]) -> pl.DataFrame:
    """Predictions for tickets, from scores drawn with a fixed seed; buckets of 200 tickets by length."""
    scores = np.random.default_rng(7).normal(size=(len(tokens), len(labels)))
    log_probs = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
    rank = tokens["token_length"].rank("ordinal", descending=True).fill_null(0).cast(pl.UInt32)
    bucket = ((rank - 1) // BUCKET_ROWS).alias("bucket_index")
    frame = pl.concat(
        [
            tokens.select("ticket_id", "token_length", "is_truncated"),
            decide(log_probs.astype(np.float32), labels),
            bucket.to_frame(),
        ],
        how="horizontal",
    )
    schema = predictions_schema("ticket_id", tokens.schema["ticket_id"], labels)
    return frame.select(schema.names()).cast(schema)


def answers(sample: pl.DataFrame, wrong: Sequence[int] = ()) -> pl.DataFrame:
    """A sample as if the reference had given the same scores, and in some rows another label beyond any tolerance."""
    labels = [field.name for field in sample.schema[LOG_PROBS].fields]
    scores = [list(row.values()) for row in sample[LOG_PROBS].to_list()]
    names = sample[LABEL].to_list()
    for row in wrong:
        names[row] = labels[(labels.index(names[row]) + 1) % len(labels)]
        scores[row] = [-0.001 if label == names[row] else -9.0 for label in labels]
    return sample.with_columns(
        pl.Series("reference_label", names, dtype=pl.String),
        pl.Series("reference_log_probs", scores, dtype=pl.List(pl.Float32)),
    )


@pytest.fixture
def reference_answers() -> Callable[..., pl.DataFrame]:
    """``reference_answers(sample, wrong=())``: see `answers`."""
    return answers


@pytest.fixture
def own_suite(tmp_path: Path) -> Callable[..., Path]:
    """``own_suite(name, changes)``: a copy of a suite whose expectations, by title, get other arguments."""

    def make(name: str, changes: dict[str, dict]) -> Path:
        suite = json.loads((ROOT / "data_contracts" / f"{name}.json").read_text(encoding="utf-8"))
        for entry in suite["expectations"]:
            entry["kwargs"] |= changes.get(entry["meta"]["title"], {})
        path = tmp_path / f"own_{name}.json"
        path.write_text(json.dumps(suite), encoding="utf-8")
        return path

    return make


@pytest.fixture
def publish_before() -> Callable[[Run, dict[str, int]], None]:
    """``publish_before(run, counts)``: an earlier run, published where this one goes, with so many predictions a label."""

    def publish(run: Run, counts: dict[str, int]) -> None:
        output = Path(run.settings.output)
        output.mkdir()
        mark(output, RUN)
        write_manifest(output, {"run_date": "2026-11-30", "labels": counts})

    return publish
