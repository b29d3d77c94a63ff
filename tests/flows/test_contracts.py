"""Each expectation of both contracts is broken alone, through the flow and on real tickets.

Where a table or a deployment can break it, it does. What only a fault of the engine can break, a fault put into the
real stage's files breaks: after the stage has run, one value is changed.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from ticket_engine.schemas import LOG_PROBS, PREDICTIONS_FILE
from ticket_engine.spot_sample import choose_sample

Run = Callable[..., tuple[int, str, str]]
ROWS, SPOT_CHECK = 160, 16


@pytest.fixture(scope="session")
def shared_tickets() -> Path:
    """The folder of real tickets; tests are skipped where it is absent."""
    folder = Path(__file__).parents[3] / "shared" / "data" / "tickets"
    if not folder.is_dir():
        pytest.skip("no ../shared/data/tickets here")
    return folder


@pytest.fixture
def real_tickets(shared_tickets: Path, tmp_path: Path) -> Callable[..., dict[str, object]]:
    """``real_tickets(change)``: the options of a run over some real tickets, after ``change`` of their frame."""

    def make(change: Callable[[pl.DataFrame], pl.DataFrame] = lambda frame: frame, *, name: str = "input") -> dict:
        frame = pl.read_parquet(shared_tickets / "multidogo_chats.dev.parquet").sort("ticket_id").head(ROWS)
        path = tmp_path / f"{name}.parquet"
        change(frame).write_parquet(path)
        return {
            "input": path,
            "labels": shared_tickets / "multidogo_chats.labels.yaml",
            "output": tmp_path / "out",
            "spot_check": SPOT_CHECK,
            "max_ticket_tokens": 512,
        }

    return make


@pytest.fixture(scope="session")
def published_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first test leaves its published run and its store for the others."""
    return tmp_path_factory.mktemp("published")


@pytest.fixture
def published(run_cli: Run, real_tickets, published_once: Path, tmp_path: Path) -> dict[str, bytes]:
    """A published run in ``tmp_path / "out"``; its files."""
    if not (published_once / "out").is_dir():
        code, _, errors = run_cli(**real_tickets())
        assert (code, errors) == (0, "")
        shutil.copytree(tmp_path / "out", published_once / "out")
        shutil.copytree(tmp_path / ".ticket-store", published_once / ".ticket-store")
    else:
        shutil.copytree(published_once, tmp_path, dirs_exist_ok=True)
    return tree(tmp_path / "out")


def tree(folder: Path) -> dict[str, bytes]:
    """Names and contents of all files of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def assert_refused(run_cli: Run, published: dict[str, bytes], tmp_path: Path) -> Callable[..., str]:
    """``assert_refused(stage, name, **options)``: the run is refused for exactly one expectation; the message."""

    def check(stage: str, name: str, **options: object) -> str:
        code, _, errors = run_cli(**options)
        assert code == 3
        total = {"tickets": 10, "predictions": 9}[stage]
        assert f"stage {stage}: 1 of {total} expectations fail: {name} found" in errors
        assert errors.count("\n") == 1
        kept = tmp_path / "out.refused"
        assert str(kept) in errors
        assert tree(tmp_path / "out") == published
        page = (kept / "data_docs" / "index.html").read_text(encoding="utf-8")
        assert "Not published: 1 expectation failed." in page
        assert page.count('class="failed">failed<') == 1
        assert (kept / PREDICTIONS_FILE).is_file() == (stage == "predictions")
        assert not (tmp_path / ".out.work").exists()
        return errors

    return check


@pytest.fixture
def fault_after(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``fault_after(stage, file, change)``: after the real stage has run, ``change`` rewrites one of its files."""
    from ticket_engine import stages

    def put(stage: str, file: str, change: Callable[[pl.DataFrame], pl.DataFrame]) -> None:
        real = getattr(stages, stage)

        def faulty(folder: Path, *arguments: object, **options: object) -> object:
            result = real(folder, *arguments, **options)
            change(pl.read_parquet(folder / file)).write_parquet(folder / file)
            return result

        monkeypatch.setattr(stages, stage, faulty)

    return put


def unsampled(frame: pl.DataFrame) -> int:
    """A row that the spot check does not look at, so that only the fault itself is found."""
    sampled = set(choose_sample(frame, SPOT_CHECK, 0)["ticket_id"])
    return next(row for row, ticket in enumerate(frame["ticket_id"]) if ticket not in sampled)


def change_one(frame: pl.DataFrame, row: int, name: str, value: object) -> pl.DataFrame:
    """The frame with another value in one row."""
    new = pl.lit(value, frame.schema[name])
    return frame.with_columns(pl.when(pl.int_range(pl.len()) == row).then(new).otherwise(name).alias(name))


def change_score(frame: pl.DataFrame, row: int, value: float) -> pl.DataFrame:
    """The frame with another first log-probability in one row."""
    scores = frame[LOG_PROBS].to_list()
    scores[row] = scores[row] | {next(iter(scores[row])): value}
    return frame.with_columns(pl.Series(LOG_PROBS, scores, dtype=frame.schema[LOG_PROBS]))


def other_label(frame: pl.DataFrame) -> pl.DataFrame:
    """The frame with a label in one row that is not the likeliest."""
    row = unsampled(frame)
    label = next(label for label in frame[LOG_PROBS].struct.fields if label != frame["label"][row])
    return change_one(frame, row, "label", label)


ENGINE_FAULTS: dict[str, tuple[str, Callable[[pl.DataFrame], pl.DataFrame]]] = {
    "a lost row": ("coverage", lambda frame: frame[1:]),
    "a doubled row": ("coverage", lambda frame: pl.concat([frame, frame[:1]])),
    "a label outside the set": (
        "known labels",
        lambda frame: change_one(frame, unsampled(frame), "label", "weather"),
    ),
    "a score that is not a number": ("scores", lambda frame: change_score(frame, unsampled(frame), float("nan"))),
    "scores that do not sum to 1": ("scores", lambda frame: change_score(frame, unsampled(frame), -0.0001)),
    "a probability above 1": ("probability range", lambda frame: change_one(frame, 0, "probability", 1.5)),
    "a margin below 0": ("margin range", lambda frame: change_one(frame, 0, "margin", -0.5)),
    "a label that is not the likeliest": ("label fits scores", other_label),
}


@pytest.mark.parametrize("fault", ENGINE_FAULTS)
def test_a_fault_of_the_engine_breaks_exactly_its_expectation_and_nothing_is_published(
    assert_refused, real_tickets, fault_after, fault: str
) -> None:
    name, change = ENGINE_FAULTS[fault]
    fault_after("gather", PREDICTIONS_FILE, change)
    message = assert_refused("predictions", name, **real_tickets())
    assert "such as multidogo_chats-" in message


INPUT_FAULTS: dict[str, tuple[str, Callable[[pl.DataFrame], pl.DataFrame]]] = {
    "an id twice": ("ids are unique", lambda frame: change_one(frame, 1, "ticket_id", frame["ticket_id"][0])),
    "an id lost": ("ids are not null", lambda frame: change_one(frame, 1, "ticket_id", None)),
    "a text lost": ("text is present", lambda frame: change_one(frame, 1, "text", "")),
}


@pytest.mark.parametrize("fault", INPUT_FAULTS)
def test_a_fault_of_the_reader_breaks_exactly_its_expectation_before_the_model_loads(
    assert_refused, real_tickets, fault_after, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    from ticket_engine import engine

    def must_not_load(*_: object) -> None:
        raise AssertionError("the weights were loaded although the input contract failed")

    monkeypatch.setattr(engine, "load_weights", must_not_load)
    name, change = INPUT_FAULTS[fault]
    fault_after("tokenize", "tickets.parquet", change)
    assert_refused("tickets", name, **real_tickets())


def most_texts_lost(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_columns(pl.when(pl.int_range(pl.len()) < 50).then("body").alias("body"))


TABLE_FAULTS: dict[str, tuple[str, Callable[[pl.DataFrame], pl.DataFrame], dict[str, object]]] = {
    "a column of another type": (
        "columns and types",
        lambda frame: frame.with_columns(ticket_id=pl.int_range(pl.len())),
        {"tickets_contract": "own suite"},
    ),
    "too few rows": ("row count", lambda frame: frame.head(20), {"contract_parameter": "min_rows=100"}),
    "most texts missing": ("quarantine rate", most_texts_lost, {}),
    "texts longer than the model may read": ("truncated rate", lambda frame: frame, {"max_ticket_tokens": 8}),
    "texts of one letter": ("text lengths", lambda frame: frame.head(50).with_columns(body=pl.lit("x")), {}),
    "texts cut by an export": (
        "text lengths not collapsed",
        lambda frame: frame.with_columns(pl.col("body").str.slice(0, 12)),
        {},
    ),
}


@pytest.mark.parametrize("fault", TABLE_FAULTS)
def test_a_bad_table_breaks_exactly_its_expectation_and_nothing_is_published(
    assert_refused, real_tickets, contracts_folder: Path, tmp_path: Path, fault: str
) -> None:
    name, change, options = TABLE_FAULTS[fault]
    if "tickets_contract" in options:
        suite = json.loads((contracts_folder / "tickets.json").read_text(encoding="utf-8"))
        suite["expectations"][0]["kwargs"]["required"] = {"ticket_id": ["String"]}
        options = {"tickets_contract": tmp_path / "own.json"}
        options["tickets_contract"].write_text(json.dumps(suite), encoding="utf-8")
    assert_refused("tickets", name, **real_tickets(change) | options)


def test_a_label_above_its_allowed_share_is_refused(assert_refused, real_tickets) -> None:
    message = assert_refused(
        "predictions", "largest label share", **real_tickets(), contract_parameter="max_label_share=0.01"
    )
    assert "%" in message


def test_drift_against_the_published_run_warns_and_publishes_or_is_refused_by_setting(
    run_cli: Run, assert_refused, real_tickets, tmp_path: Path
) -> None:
    before = pl.read_parquet(tmp_path / "out" / PREDICTIONS_FILE)
    counts = before["label"].value_counts().filter(pl.col("count") >= 5).sort("count", "label")
    label, tickets = counts.row(0)
    assert tickets < 0.4 * len(before)
    few_others = before.filter(pl.col("label") != label).head(3)  # one label alone is a fault of its own
    alike = pl.concat([before.filter(pl.col("label") == label), few_others])["ticket_id"].implode()
    options = real_tickets(lambda frame: frame.filter(pl.col("ticket_id").is_in(alike)))
    options["contract_parameter"] = "min_rows_for_shares=1"
    assert_refused("predictions", "label drift", **options, on_drift="fail")
    code, _, errors = run_cli(**options, on_drift="warn")
    assert (code, errors) == (0, "")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["contracts"]["predictions"]["passed"] is True
    drift = manifest["contracts"]["predictions"]["expectations"][-1]
    assert (drift["name"], drift["passed"], drift["severity"]) == ("label drift", False, "warning")


def test_drift_of_a_night_in_a_folder_of_its_own_is_measured_against_the_night_before(
    run_cli: Run, real_tickets, tmp_path: Path
) -> None:
    nights = {"output": tmp_path / "run_date={run_date}", "store": tmp_path / "store"}
    code, _, errors = run_cli(**real_tickets() | nights, run_date="2026-11-28")
    assert (code, errors) == (0, "")
    before = pl.read_parquet(tmp_path / "run_date=2026-11-28" / PREDICTIONS_FILE)
    label = before["label"].value_counts().sort("count", "label")["label"][0]
    alike = before.filter(pl.col("label") == label)["ticket_id"].implode()
    options = real_tickets(lambda frame: frame.filter(pl.col("ticket_id").is_in(alike))) | nights
    options |= {"contract_parameter": "min_rows_for_shares=1", "on_drift": "fail"}
    code, _, errors = run_cli(**options, run_date="2026-11-30")
    assert code == 3
    assert "label drift" in errors
    assert "since the run of 2026-11-28" in errors
    assert not (tmp_path / "run_date=2026-11-30").exists()
    code, _, errors = run_cli(**real_tickets() | nights, on_drift="fail", run_date="2026-11-30")
    assert (code, errors) == (0, "")


def test_a_scorer_that_is_wrong_in_one_bucket_only_is_refused(
    assert_refused, real_tickets, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In one bucket of six the scorer gives each label the score of its neighbour."""
    from ticket_engine import bucket_scoring
    from ticket_engine.engine import Engine

    bad, current = {}, []
    real_bucket, real_score = bucket_scoring.classify_bucket, Engine.score

    def bucket_by_bucket(bucket, folder: Path, store: Path):
        current[:] = [bucket.index]
        return real_bucket(bucket, folder, store)

    def wrong_in_one_bucket(engine: Engine, tickets: list):
        scores = real_score(engine, tickets)
        if current == [3]:
            bad["tickets"] = bad.get("tickets", 0) + len(tickets)
            scores = scores[:, [*range(1, scores.shape[1]), 0]]
        return scores

    monkeypatch.setattr(bucket_scoring, "classify_bucket", bucket_by_bucket)
    monkeypatch.setattr(Engine, "score", wrong_in_one_bucket)
    options = real_tickets() | {"store": tmp_path / "own-store", "workers": 1, "batch_size": 8, "max_buckets": 12}
    message = assert_refused("predictions", "agreement", **options)
    assert 0 < bad["tickets"] < ROWS / 4
    assert "multidogo_chats-" in message
    kept = pl.read_parquet(tmp_path / "out.refused" / PREDICTIONS_FILE)
    named = {ticket for ticket in kept["ticket_id"] if ticket in message}
    assert set(kept.filter(pl.col("ticket_id").is_in(list(named)))["bucket_index"]) == {3}


def test_an_unknown_threshold_is_a_users_error_before_anything_runs(run_cli: Run, real_tickets, tmp_path: Path) -> None:
    code, _, errors = run_cli(**real_tickets(), contract_parameter="max_quarantene_rate=0.1")
    assert code == 2
    assert "max_quarantene_rate" in errors
    assert "max_quarantine_rate" in errors
    assert not (tmp_path / "out").exists()


def test_an_empty_table_is_refused_and_publishes_an_empty_valid_output_where_it_is_allowed(
    run_cli: Run, real_tickets, tmp_path: Path
) -> None:
    options = real_tickets(lambda frame: frame.clear())
    code, _, errors = run_cli(**options)
    assert code == 3
    assert "row count" in errors
    code, _, errors = run_cli(**options, contract_parameter="min_rows=0")
    assert (code, errors) == (0, "")
    assert len(pl.read_parquet(tmp_path / "out" / PREDICTIONS_FILE)) == 0
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["contracts"]["tickets"]["passed"] is manifest["contracts"]["predictions"]["passed"] is True
    assert manifest["rows"]["input"] == 0
