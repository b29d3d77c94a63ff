"""Evaluation: scores against hand-counted ones and scikit-learn's, comparisons, page and answers."""

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from sklearn.metrics import confusion_matrix, f1_score, precision_recall_fscore_support

from ticket_engine.answers import EVALUATION_FILE, read_answers, right_on, write_evaluation
from ticket_engine.baselines import baseline_answers
from ticket_engine.errors import InputError, OutputError, SettingsError
from ticket_engine.evaluation import compare_answers, evaluate, plain_words, review_curve, share
from ticket_engine.evaluation_page import draw_pictures, page

LABELS = ("billing", "delivery", "account")


def make_joined(count: int = 200, right: float = 0.8, seed: int = 0) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    gold = rng.integers(0, 3, count)
    given = np.where(rng.random(count) < right, gold, rng.integers(0, 3, count))
    return pl.DataFrame(
        {
            "id": [f"t{index}" for index in range(count)],
            "gold": [LABELS[index] for index in gold],
            "label": [LABELS[index] for index in given],
            "probability": np.where(gold == given, 0.9, 0.4).astype(np.float32),
            "group": [("en", "de", None)[index % 3] for index in range(count)],
        }
    )


def test_scores_equal_those_of_scikit_learn() -> None:
    joined = make_joined()
    made = evaluate(joined, LABELS, missing=3)
    gold, given = joined["gold"].to_list(), joined["label"].to_list()
    np.testing.assert_array_equal(made.confusion, confusion_matrix(gold, given, labels=LABELS))
    assert made.macro_f1 == pytest.approx(f1_score(gold, given, average="macro"))
    precision, recall, f1, support = precision_recall_fscore_support(gold, given, labels=LABELS)
    for index, score in enumerate(made.per_label):
        assert score.precision.value == pytest.approx(precision[index])
        assert score.recall.value == pytest.approx(recall[index])
        assert score.f1 == pytest.approx(f1[index])
        assert score.recall.tickets == support[index]
        assert score.precision.lower < score.precision.value < score.precision.upper
    assert made.missing == 3
    assert made.accuracy.value == pytest.approx(np.mean([g == h for g, h in zip(gold, given, strict=True)]))


def test_wilson_interval_of_nine_in_ten() -> None:
    made = share(9, 10)
    assert (made.lower, made.upper) == pytest.approx((0.5958, 0.9821), abs=1e-4)
    assert (share(0, 0).lower, share(0, 0).upper) == (0.0, 1.0)


def test_groups_have_their_own_accuracy() -> None:
    joined = make_joined()
    made = evaluate(joined, LABELS, 0)
    assert list(made.groups) == ["de", "en", "(none)"]
    german = joined.filter(pl.col("group") == "de")
    assert made.groups["de"].value == pytest.approx((german["gold"] == german["label"]).mean())
    assert sum(score.tickets for score in made.groups.values()) == 200


def test_confused_pairs_come_by_count_with_the_surest_mistakes_first() -> None:
    joined = pl.DataFrame(
        {
            "id": ["a", "b", "c", "d"],
            "gold": ["billing", "billing", "account", "account"],
            "label": ["delivery", "delivery", "billing", "account"],
            "probability": [0.5, 0.9, 0.6, 0.7],
        }
    )
    first, second = evaluate(joined, LABELS, 0).confused
    assert (first.gold, first.predicted, first.tickets, first.ids) == ("billing", "delivery", 2, ("b", "a"))
    assert second.tickets == 1


def test_sending_the_least_sure_to_people_leaves_the_right_ones() -> None:
    confidence, correct = np.linspace(0, 1, 20), np.arange(20) >= 10
    points = review_curve(confidence, correct)
    assert points[0].accuracy == 0.5
    assert next(point for point in points if point.share == 0.5).accuracy == 1.0


def test_mcnemar_counts_only_tickets_that_one_got_right() -> None:
    first = np.array([True] * 12 + [False] * 2 + [True] * 86)
    second = np.array([False] * 12 + [True] * 2 + [True] * 86)
    made = compare_answers(first, second)
    assert (made.only_first, made.only_second, made.difference) == (12, 2, pytest.approx(0.1))
    assert made.chance == pytest.approx(0.01294, abs=1e-4)
    assert compare_answers(first, first).chance == 1.0


def test_words_say_when_nothing_was_learnt() -> None:
    assert "no better than chance" in plain_words(evaluate(make_joined(right=0.0), LABELS, 0))
    assert "labels are right" in plain_words(evaluate(make_joined(right=0.8), LABELS, 0))


def test_the_page_shows_everything_and_escapes_names() -> None:
    joined = make_joined().with_columns(
        pl.col("gold", "label").replace("account", "<b>account</b>"), id=pl.lit("<i>") + pl.col("id")
    )
    made = evaluate(joined, ("billing", "delivery", "<b>account</b>"), 0)
    pictures = draw_pictures(made)
    assert all(png.startswith(b"\x89PNG") for png in pictures.values())
    comparison = {"rival": (share(1, 2), compare_answers(np.array([True, False]), np.array([False, False])))}
    text = page(made, pictures, comparison)
    assert "<b>account" not in text
    assert "<i>t" not in text
    assert text.count("data:image/png") == 3
    assert "rival" in text


def test_seventy_seven_labels_can_be_drawn() -> None:
    labels = tuple(f"label_{index:02d}" for index in range(77))
    joined = pl.DataFrame({"id": labels, "gold": labels, "label": labels, "probability": [0.5] * 77})
    assert draw_pictures(evaluate(joined, labels, 0))["confusion"].startswith(b"\x89PNG")


def test_baselines_learn_what_words_say_and_nothing_from_random_labels() -> None:
    rng = np.random.default_rng(0)
    names = rng.choice(LABELS, 150)
    texts = [f"please help with my {name} question {rng.integers(99)}" for name in names]
    answers = baseline_answers(texts, names)
    assert (answers["naive Bayes"] == names).mean() > 0.95
    assert (answers["TF-IDF regression"] == names).mean() > 0.95
    assert (answers["largest class"] == names).mean() < 0.5
    shuffled = rng.permutation(names)
    assert (baseline_answers(texts, shuffled)["TF-IDF regression"] == shuffled).mean() < 0.5


def write_tables(folder: Path, **changes: list) -> tuple[str, str]:
    log_probs = [dict.fromkeys(LABELS, -1.0)] * 3
    given = {"id": ["a", "b", "c"], "label": ["billing"] * 3, "probability": [0.5] * 3, "log_probs": log_probs}
    pl.DataFrame(given).write_parquet(folder / "predictions.parquet")
    gold = {"id": ["c", "a", "z"], "label": ["billing", "other", "billing"], "source": ["x:en:1", "x:de:2", "x:de:3"]}
    pl.DataFrame(gold | changes).write_parquet(folder / "gold.parquet")
    return str(folder), str(folder / "gold.parquet")


def test_answers_are_joined_by_id_in_gold_order(tmp_path: Path) -> None:
    predictions, gold = write_tables(tmp_path)
    made = read_answers(
        predictions, gold, id_column="id", gold_column="label", group=("source", r":([a-z]+):"), text_columns=("body",)
    )
    assert made.joined["id"].to_list() == ["c", "a"]
    assert made.joined["group"].to_list() == ["en", "de"]
    assert made.joined["text"].null_count() == 2
    assert made.labels == (*LABELS, "other")
    assert made.missing == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"id": ["c", "c", "z"]}, "1 ids of .* are repeated: c"),
        ({"id": ["x", "y", "z"]}, "None of the 3 gold ids"),
        ({"label": [None, None, None]}, "holds no label"),
    ],
)
def test_gold_that_cannot_be_joined_is_refused(tmp_path: Path, changes: dict, words: str) -> None:
    predictions, gold = write_tables(tmp_path, **changes)
    with pytest.raises(InputError, match=words):
        read_answers(predictions, gold, id_column="id", gold_column="label")


@pytest.mark.parametrize("pattern", ["(", "no bracket", "(two)(brackets)"])
def test_a_group_pattern_has_one_bracket(tmp_path: Path, pattern: str) -> None:
    predictions, gold = write_tables(tmp_path)
    with pytest.raises(SettingsError, match="--group-pattern"):
        read_answers(predictions, gold, id_column="id", gold_column="label", group=("source", pattern))


def test_two_runs_are_compared_on_the_tickets_that_both_answered(tmp_path: Path) -> None:
    predictions, gold = write_tables(tmp_path)
    first = read_answers(predictions, gold, id_column="id", gold_column="label")
    frame = pl.read_parquet(tmp_path / "predictions.parquet").filter(pl.col("id") != "a")
    frame.with_columns(label=pl.lit("account")).write_parquet(tmp_path / "other.parquet")
    second = read_answers(str(tmp_path / "other.parquet"), gold, id_column="id", gold_column="label")
    ours, theirs = right_on(first, second)
    assert (ours.tolist(), theirs.tolist()) == ([True], [False])


def test_an_evaluation_is_written_once_more_but_not_over_other_files(tmp_path: Path) -> None:
    made = evaluate(make_joined(), LABELS, 0)
    for _ in range(2):
        write_evaluation(tmp_path / "out", made, {}, {"index.html": b"page"})
    assert json.loads((tmp_path / "out" / EVALUATION_FILE).read_text())["tickets"] == 200
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(OutputError, match="Name another folder"):
        write_evaluation(tmp_path / "mine", made, {}, {})
