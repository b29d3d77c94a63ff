"""Review: promised precision, budget, and the order of the review file."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from tests.toy_rows import IDENTITY, LABELS, LAYERS, make_label_rows, make_rows
from ticket_engine.errors import SettingsError
from ticket_engine.head_fitting import FitRule, fit_head
from ticket_engine.heads import Head, apply_head
from ticket_engine.lexical import lexical_features
from ticket_engine.review import ReviewRule, choose_review, review_rows


@pytest.fixture(scope="module")
def head() -> Head:
    rule = FitRule(layers=LAYERS, depth=2)  # shallow states leave enough errors to see a promise kept
    return fit_head(make_rows(500, 0), make_label_rows(), LABELS, rule=rule, identity=IDENTITY)


def test_a_promised_precision_holds_on_new_tickets(head: Head) -> None:
    rows = make_rows(2000, 1)
    log_probs, _ = apply_head(head, lexical_features(rows.texts, head.lexicon), rows.hidden)
    right = log_probs.argmax(1) == rows.label_indices
    promised = right.mean() + 0.5 * (1 - right.mean())
    choice = choose_review(head, np.exp(log_probs.max(1)), ReviewRule(precision=promised))
    needs = choice.needed
    assert 0 < choice.threshold < 1
    assert "with 80% confidence by 166 held-out tickets" in choice.words
    assert 0.2 < (~needs).mean() < 1
    spread = np.sqrt(promised * (1 - promised) / (~needs).sum())
    assert right[~needs].mean() > promised - 3 * spread


def test_a_budget_is_a_share_of_the_run(head: Head) -> None:
    needs = choose_review(head, np.linspace(0, 1, 50), ReviewRule(budget=0.1)).needed
    assert needs.sum() == 5
    assert needs[:5].all()


def test_without_a_promise_no_ticket_needs_a_look(head: Head) -> None:
    choice = choose_review(head, np.linspace(0, 1, 50), ReviewRule())
    assert not choice.needed.any()
    assert (choice.threshold, choice.words) == (None, "")


def test_a_promise_that_cannot_be_kept_sends_everything_to_people(head: Head) -> None:
    poor = replace(head, held_out_correct=np.zeros(len(head.held_out_confidence), dtype=bool))
    choice = choose_review(poor, np.ones(3), ReviewRule(precision=0.9))
    assert choice.needed.all()
    assert choice.threshold is None
    assert choice.words == "a precision of 0.9 cannot be promised with 166 held-out tickets: all need a look"


def test_two_promises_exclude_each_other() -> None:
    with pytest.raises(SettingsError, match="exclude each other"):
        ReviewRule(precision=0.9, budget=0.1)


def predictions_of(probs: np.ndarray) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "ticket_id": ["a", "b", "c", "d"],
            "label": ["x", "x", "y", "y"],
            "probability": probs.max(1).astype(np.float32),
            "log_probs": [dict(zip(("x", "y"), map(float, np.log(row)), strict=True)) for row in probs],
        }
    )


PROBS = np.array([[0.9, 0.1], [0.5, 0.5], [0.3, 0.7], [0.01, 0.99]])
TEXTS = pl.DataFrame({"subject": ["A", "B", None], "body": ["one", "two", "three"]})


def test_the_review_file_begins_where_a_label_tells_most() -> None:
    rows = review_rows(predictions_of(PROBS), np.array([True, True, True, False]), TEXTS, "ticket_id")
    assert rows["ticket_id"].to_list() == ["b", "c", "a"]
    assert rows["second_label"].to_list() == ["y", "x", "y"]
    assert rows["second_probability"].to_list() == pytest.approx([0.5, 0.3, 0.1])
    assert rows["value"][0] == pytest.approx(np.log(2))
    assert review_rows(predictions_of(PROBS), np.zeros(4, dtype=bool), TEXTS.clear(), "ticket_id").is_empty()


def test_the_review_file_shows_the_text_and_leaves_the_label_to_people() -> None:
    rows = review_rows(predictions_of(PROBS), np.array([True, True, True, False]), TEXTS, "ticket_id")
    assert rows["body"].to_list() == ["two", "three", "one"]
    assert rows["subject"].to_list() == ["B", None, "A"]
    assert rows["label"].to_list() == [None, None, None]
    assert rows.schema["label"] == pl.String
    assert rows["predicted_label"].to_list() == ["x", "y", "x"]


@pytest.mark.parametrize("name", ["value", "predicted_label", "label", "probability", "^a$", "*"])
def test_a_text_or_id_column_of_any_name_keeps_it_in_the_review_file(name: str) -> None:
    texts = TEXTS.select(pl.col("body").alias(name))
    rows = review_rows(predictions_of(PROBS), np.array([True, True, True, False]), texts, "ticket_id")
    assert rows[name].to_list() == ["two", "three", "one"]
    if name not in ("label", "probability"):
        rows = review_rows(predictions_of(PROBS), np.array([True, True, True, False]), TEXTS, name)
        assert rows.columns[0] == name
        assert rows[name].to_list() == ["b", "c", "a"]
