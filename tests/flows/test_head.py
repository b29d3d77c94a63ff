"""Tickets labelled by a fitted head through the command line, on a tiny model."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tasks.artifacts import run_markdown
from ticket_engine.head_files import load_head, save_head
from ticket_engine.heads import Head

LABELS = ("billing", "delivery", "returns", "account")
WORDS = {
    "billing": ("invoice", "charged", "refund", "payment"),
    "delivery": ("parcel", "courier", "delivered", "late"),
    "returns": ("send back", "too small", "exchange", "unwanted"),
    "account": ("password", "log in", "profile", "locked"),
}


def make_tickets(count: int, seed: int) -> pl.DataFrame:
    """Tickets that name their label in three of four cases."""
    rng = np.random.default_rng(seed)
    gold = [LABELS[index] for index in rng.integers(0, 4, count)]
    bodies = [
        f"Hello {rng.integers(1000)}, {rng.choice(WORDS[name]) if rng.random() < 0.75 else 'please help'}, order {index}"
        for index, name in enumerate(gold)
    ]
    return pl.DataFrame({"ticket_id": [f"s{seed}-{index}" for index in range(count)], "body": bodies, "label": gold})


@pytest.fixture
def head(prefect_server, tiny_model, labels_file, tmp_path: Path) -> Path:
    """A head of three stages, fitted on 150 tickets: the text, layer 1 and layer 3 each decide some."""
    from flows.fit_labels import fit_labels
    from ticket_engine.fit_settings import FitSettings

    make_tickets(150, 0).write_parquet(tmp_path / "labelled.parquet")
    folder = tmp_path / "head"
    fit_labels(
        FitSettings(
            input=str(tmp_path / "labelled.parquet"),
            labels=str(labels_file(*LABELS)),
            output=str(folder),
            model=str(tiny_model("llama")),
            dtype="float32",
            threads=1,
            depth=3,
        )
    )
    save_head(in_three_stages(load_head(folder)), folder)
    return folder


def in_three_stages(made: Head) -> Head:
    """The same with thresholds between which tickets surely fall."""
    from dataclasses import replace

    text, last = made.stages[0], made.stages[-1]
    middle = replace(last, depth=1, hidden_weights={b: w for b, w in last.hidden_weights.items() if b.depth <= 1})
    stages = (replace(text, threshold=0.8), replace(middle, threshold=0.5), replace(last, threshold=0.0))
    return replace(made, stages=stages)


@pytest.fixture
def run_head(run_cli: Callable, head: Path, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    make_tickets(120, 1).write_parquet(tmp_path / "new.parquet")
    defaults = {"input": tmp_path / "new.parquet", "output": tmp_path / "out", "head": head}
    return lambda **options: run_cli(**defaults | options)


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def test_a_head_labels_new_tickets_better_than_the_model_alone_and_says_where_each_was_decided(
    run_head: Callable, run_cli: Callable, tmp_path: Path
) -> None:
    code, printed, errors = run_head()
    assert (code, errors) == (0, "")
    made, gold = pl.read_parquet(tmp_path / "out" / "predictions.parquet"), make_tickets(120, 1)
    assert set(made["stage"]) == {0, 1, 3}
    right = (made["label"] == gold["label"]).mean()
    run_cli(input=tmp_path / "new.parquet", output=tmp_path / "cold")
    cold = pl.read_parquet(tmp_path / "cold" / "predictions.parquet")
    assert "stage" not in cold.columns
    assert right > 0.6 > (cold["label"] == gold["label"]).mean()
    manifest = manifest_of(tmp_path / "out")
    counts = {str(depth): count for depth, count in made.group_by("stage").len().iter_rows()}
    assert manifest["head"]["tickets_by_layers"] == counts
    assert manifest["plan"]["by_text"] == counts["0"]  # no text is doubled here
    assert manifest["spot_check"]["agreement"] == 1.0
    assert f"{counts['0']} by text alone" in printed
    by_model = 120 - counts["0"]
    words = "Different tickets scored by the model / decided by their text / known before"
    assert f"| {words} | {by_model} / {counts['0']} / 0 |" in run_markdown(manifest)


def test_a_ticket_decided_by_its_text_has_no_bucket_and_the_others_have_one(run_head: Callable, tmp_path: Path) -> None:
    run_head()
    made = pl.read_parquet(tmp_path / "out" / "predictions.parquet")
    assert made.filter(pl.col("stage") == 0)["bucket_index"].is_null().all()
    assert made.filter(pl.col("stage") > 0)["bucket_index"].is_not_null().all()


def test_what_a_ticket_gets_does_not_depend_on_the_other_tickets(run_head: Callable, tmp_path: Path) -> None:
    run_head(spot_check=0)
    together = pl.read_parquet(tmp_path / "out" / "predictions.parquet")
    make_tickets(120, 1)[::7].write_parquet(tmp_path / "few.parquet")
    run_head(input=tmp_path / "few.parquet", output=tmp_path / "few", store=tmp_path / "other-store", batch_size=2)
    alone = pl.read_parquet(tmp_path / "few" / "predictions.parquet")
    both = alone.join(together, on="ticket_id", validate="1:1")
    assert (both["stage"] == both["stage_right"]).all()
    assert (both["label"] == both["label_right"]).all()
    np.testing.assert_allclose(both["probability"], both["probability_right"], atol=1e-4)


def test_a_second_run_with_the_same_head_does_no_pass(run_head: Callable, tmp_path: Path) -> None:
    run_head()
    first = pl.read_parquet(tmp_path / "out" / "predictions.parquet")
    code, printed, _ = run_head()
    assert code == 0
    assert "nothing to compute" in printed
    assert manifest_of(tmp_path / "out")["plan"]["buckets"] == 0
    again = pl.read_parquet(tmp_path / "out" / "predictions.parquet")
    assert again.drop("bucket_index").equals(first.drop("bucket_index"))


def test_another_head_does_not_use_the_scores_of_the_first(run_head: Callable, head: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    run_head()
    made = load_head(head)
    cooler = replace(made, stages=tuple(replace(stage, temperature=stage.temperature / 2) for stage in made.stages))
    save_head(cooler, head)
    run_head()
    assert manifest_of(tmp_path / "out")["plan"]["stored"] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "qwen2"}, "another model"),
        ({"labels": True}, "another labels file"),
        ({"head": "nowhere"}, "no fitted head"),
        ({"execution": "padded"}, "needs execution packed"),
        ({"review_precision": 0.9, "review_budget": 0.1}, "exclude each other"),
        ({"review_precision": 1.5}, "review_precision"),
    ],
)
def test_a_head_that_does_not_fit_the_run_is_refused_in_a_line_or_two(
    run_head: Callable, tiny_model, labels_file, tmp_path: Path, options: dict, words: str
) -> None:
    if "model" in options:
        options = {"model": tiny_model(options["model"])}
    if "labels" in options:
        options = {"labels": labels_file("billing", "delivery", "returns", "profile")}
    code, _, errors = run_head(**options)
    assert code == 2
    assert words in errors
    assert len(errors.strip().splitlines()) <= 2
    assert not (tmp_path / "out").exists()


def test_a_review_budget_marks_the_least_sure_tickets_and_lists_them_by_value(
    run_head: Callable, tmp_path: Path
) -> None:
    code, printed, _ = run_head(review_budget=0.25)
    assert code == 0
    made = pl.read_parquet(tmp_path / "out" / "predictions.parquet")
    review = pl.read_parquet(tmp_path / "out" / "review.parquet")
    marked = made.filter("needs_review")
    assert 0 < len(marked) <= 30
    assert marked["probability"].max() < made.filter(~pl.col("needs_review"))["probability"].min()
    assert set(review["ticket_id"]) == set(marked["ticket_id"])
    assert review["value"].is_sorted(descending=True)
    assert "review.parquet" in manifest_of(tmp_path / "out")["files"]
    assert f"{len(marked)} tickets for people" in printed


def test_a_promised_precision_leaves_unmarked_only_tickets_that_keep_it_on_held_out_rows(
    run_head: Callable, head: Path, tmp_path: Path
) -> None:
    _, printed, _ = run_head(review_precision=0.8)
    made = pl.read_parquet(tmp_path / "out" / "predictions.parquet")
    review = manifest_of(tmp_path / "out")["review"]
    fitted = load_head(head)
    if review["review_threshold"] is None:
        assert "cannot be promised with 50 held-out tickets" in printed
        assert made["needs_review"].all()
        return
    assert (made["needs_review"] == (made["probability"] < review["review_threshold"])).all()
    assert "0.8 are right, with 80% confidence by 50 held-out tickets" in printed
    kept = fitted.held_out_confidence >= review["review_threshold"]
    assert fitted.held_out_correct[kept].mean() >= 0.8


def test_a_precision_that_cannot_be_promised_is_said_and_sends_every_ticket_to_people(
    run_head: Callable, tmp_path: Path
) -> None:
    code, printed, _ = run_head(review_precision=0.99)
    assert code == 0
    assert "a precision of 0.99 cannot be promised with 50 held-out tickets" in printed
    assert pl.read_parquet(tmp_path / "out" / "predictions.parquet")["needs_review"].all()
    assert manifest_of(tmp_path / "out")["review"]["review_threshold"] is None


def test_an_evaluation_says_how_many_tickets_the_head_was_fitted_on(run_head: Callable, tmp_path: Path) -> None:
    from flows.evaluate import evaluate_labels
    from ticket_engine.evaluate_settings import EvaluateSettings

    both = pl.concat([make_tickets(150, 0).head(30), make_tickets(120, 1)])
    both.write_parquet(tmp_path / "gold.parquet")
    run_head(input=tmp_path / "gold.parquet")
    made = {"predictions": str(tmp_path / "out"), "output": str(tmp_path / "evaluation")}
    lines = evaluate_labels(EvaluateSettings(gold=str(tmp_path / "gold.parquet"), **made))
    assert any("Warning: 30 of these 150 tickets were fitting rows" in line for line in lines)
    assert "Warning: 30 of these" in (tmp_path / "evaluation" / "index.html").read_text()
    make_tickets(120, 1).write_parquet(tmp_path / "new-gold.parquet")
    lines = evaluate_labels(EvaluateSettings(gold=str(tmp_path / "new-gold.parquet"), **made))
    assert not any("Warning" in line for line in lines)
