"""Fitting and measuring through their command lines, in process, on a tiny model."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from flows import cli, evaluate_cli, fit_cli
from flows.exits import run_app
from ticket_engine.head_files import load_head
from ticket_engine.heads import decide_by_text
from ticket_engine.ownership import MARK_FILE

LABELS = ("billing", "delivery", "returns", "account")
WORDS = {
    "billing": ("invoice", "charged", "refund", "payment"),
    "delivery": ("parcel", "courier", "delivered", "late"),
    "returns": ("send back", "too small", "exchange", "unwanted"),
    "account": ("password", "log in", "profile", "locked"),
}
Main = Callable[..., tuple[int, str, str]]


def make_tickets(count: int, seed: int) -> pl.DataFrame:
    """Tickets that name their label in two of three cases."""
    rng = np.random.default_rng(seed)
    gold = [LABELS[index] for index in rng.integers(0, 4, count)]
    bodies = [
        f"Hello {rng.integers(1000)}, {rng.choice(WORDS[name]) if rng.random() < 0.67 else 'please help'}, order {index}"
        for index, name in enumerate(gold)
    ]
    return pl.DataFrame({"ticket_id": [f"s{seed}-{index}" for index in range(count)], "body": bodies, "label": gold})


@pytest.fixture
def run_main(prefect_server, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Main:
    def run(module, name: str, **options: object) -> tuple[int, str, str]:
        arguments = [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", str(value))]
        monkeypatch.setattr("sys.argv", [name, *(part for part in arguments if part != "True")])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            run_app(module.app, name)
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.fixture
def fit_options(tiny_model, labels_file, tmp_path: Path) -> dict:
    source = tmp_path / "labelled.parquet"
    make_tickets(150, 0).write_parquet(source)
    return {
        "input": source,
        "labels": labels_file(*LABELS),
        "output": tmp_path / "head",
        "model": tiny_model("llama"),
        "dtype": "float32",
        "threads": 1,
        "max_ticket_tokens": 256,
    }


def test_a_fitted_head_labels_new_tickets_and_says_what_it_measured(run_main: Main, fit_options: dict) -> None:
    code, printed, errors = run_main(fit_cli, "flows.fit_labels", **fit_options)
    assert (code, errors) == (0, "")
    assert "150 different labelled ones" in printed
    head = load_head(fit_options["output"])
    assert head.labels == LABELS
    assert head.report["chance_of_random_labels"] <= 0.01
    new = make_tickets(200, 1)
    log_probs, _ = decide_by_text(head, new["body"].to_list())
    given = np.array(LABELS)[log_probs.argmax(1)]
    assert (given == new["label"].to_numpy()).mean() > 0.5
    assert not (fit_options["output"].parent / ".head.work").exists()


def test_random_labels_end_in_plain_words_and_leave_the_old_head(run_main: Main, fit_options: dict) -> None:
    run_main(fit_cli, "flows.fit_labels", **fit_options)
    before = {path.name: path.read_bytes() for path in fit_options["output"].iterdir()}
    tickets = make_tickets(150, 0)
    shuffled = np.random.default_rng(3).permutation(tickets["label"].to_numpy())
    tickets.with_columns(label=pl.Series(shuffled)).write_parquet(fit_options["input"])
    code, printed, errors = run_main(fit_cli, "flows.fit_labels", **fit_options)
    assert code == 2
    assert printed == ""
    assert errors.startswith("Error: Nothing can be learnt from these 150 labels")
    assert len(errors.splitlines()) <= 2
    assert {path.name: path.read_bytes() for path in fit_options["output"].iterdir()} == before


def test_the_loop_of_the_docs_fit_classify_review_and_fit_again_keeps_every_label(
    run_main: Main, fit_options: dict, tmp_path: Path
) -> None:
    """docs/heads.md: the tickets that were labelled are part of the night's table, as in a real desk."""
    both = pl.concat([make_tickets(20, 0), make_tickets(60, 1)])
    make_tickets(20, 0).write_parquet(fit_options["input"])
    both.drop("label").write_parquet(tmp_path / "night.parquet")
    code, printed, errors = run_main(fit_cli, "flows.fit_labels", **fit_options, depth=0)
    assert (code, "20 different labelled ones" in printed) == (0, True), errors
    options = {name: fit_options[name] for name in ("labels", "model", "dtype", "threads")}
    options |= {"input": tmp_path / "night.parquet", "head": fit_options["output"], "review_budget": 0.5}
    code, _, errors = run_main(cli, "flows.classify_tickets", **options, output=tmp_path / "out")
    assert code == 0, errors
    review = pl.read_parquet(tmp_path / "out" / "review.parquet")
    assert review["label"].is_null().all()
    gold = both.select("ticket_id", pl.col("label").alias("gold"))
    known = review.join(gold, on="ticket_id", how="left", maintain_order="left").with_row_index()
    answered = known.with_columns(pl.when(pl.col("index") % 3 > 0).then("gold").alias("label")).drop("index", "gold")
    answered.write_parquet(tmp_path / "reviewed.parquet")
    new = answered.filter(pl.col("label").is_not_null() & pl.col("ticket_id").str.starts_with("s1-"))
    assert 0 < len(new) < len(answered)
    code, printed, errors = run_main(
        fit_cli, "flows.fit_labels", **fit_options, add=tmp_path / "reviewed.parquet", depth=0
    )
    assert code == 0, errors
    assert f"{20 + len(new)} different labelled ones" in printed


def test_reviewed_tickets_are_added(run_main: Main, fit_options: dict, tmp_path: Path) -> None:
    make_tickets(30, 5).write_parquet(tmp_path / "reviewed.parquet")
    _, printed, errors = run_main(
        fit_cli, "flows.fit_labels", **fit_options, add=tmp_path / "reviewed.parquet", depth=0
    )
    assert errors == ""
    assert "180 different labelled ones" in printed
    assert load_head(fit_options["output"]).depths == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"depth": "deep"}, "depth"),
        ({"depth": 4}, "Allowed: auto, best, or 0 to 3 layers"),
        ({"label_column": "gold"}, "no column 'gold' with labels"),
        ({"input": "nowhere.parquet"}, "nowhere.parquet"),
    ],
)
def test_a_users_mistake_is_told_in_a_line_or_two(run_main: Main, fit_options: dict, change: dict, words: str) -> None:
    code, _, errors = run_main(fit_cli, "flows.fit_labels", **fit_options | change)
    assert code == 2
    assert words in errors
    assert len(errors.strip().splitlines()) <= 2
    assert "Traceback" not in errors


def write_predictions(path: Path, tickets: pl.DataFrame, right: float, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    gold = tickets["label"].to_numpy()
    given = np.where(rng.random(len(gold)) < right, gold, rng.choice(LABELS, len(gold)))
    log_probs = [{name: float(np.log(0.7 if name == label else 0.1)) for name in LABELS} for label in given]
    frame = pl.DataFrame({"ticket_id": tickets["ticket_id"], "label": given.astype(str), "log_probs": log_probs})
    frame.with_columns(probability=pl.lit(0.7, dtype=pl.Float32)).write_parquet(path)
    return path


def test_an_evaluation_compares_with_another_run_and_with_rivals(run_main: Main, tmp_path: Path) -> None:
    tickets = make_tickets(120, 0).with_columns(source=pl.Series([f"x:{'ab'[row % 2]}:{row}" for row in range(120)]))
    tickets.write_parquet(tmp_path / "gold.parquet")
    code, printed, errors = run_main(
        evaluate_cli,
        "flows.evaluate",
        predictions=write_predictions(tmp_path / "one.parquet", tickets, 0.9, 0),
        other=write_predictions(tmp_path / "two.parquet", tickets, 0.3, 1),
        gold=tmp_path / "gold.parquet",
        output=tmp_path / "out",
        group_column="source",
        group_pattern=":([ab]):",
    )
    assert (code, errors) == (0, "")
    for words in ("other run, 120 tickets", "naive Bayes", "TF-IDF regression", "group a: accuracy", "macro F1"):
        assert words in printed
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names - {MARK_FILE} == {"evaluation.json", "index.html", "confusion.png", "reliability.png", "review.png"}
    assert "order 7" not in (tmp_path / "out" / "index.html").read_text()


def test_predictions_that_say_nothing_are_called_so(run_main: Main, tmp_path: Path) -> None:
    tickets = make_tickets(120, 0)
    tickets.drop("body").write_parquet(tmp_path / "gold.parquet")
    predictions = write_predictions(tmp_path / "one.parquet", tickets, 0.0, 0)
    _, printed, _ = run_main(
        evaluate_cli, "flows.evaluate", predictions=predictions, gold=tmp_path / "gold.parquet", output=tmp_path / "out"
    )
    assert "no better than chance" in printed
