"""The sample tickets: as many as asked for, always the same, spread like the published lengths, readable."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samples.sample_tickets import HERE, count_tokens, make_tickets, phrases, target_lengths, token_lengths
from ticket_engine.labels import read_labels


def texts_of(tickets: pl.DataFrame) -> list[str]:
    """The texts as the read stage joins them."""
    return tickets.select(pl.concat_str(["subject", "body"], separator="\n", ignore_nulls=True)).to_series().to_list()


@pytest.fixture(scope="module")
def tickets() -> pl.DataFrame:
    """The 600 tickets of `make run`."""
    return make_tickets(600, 0)


@pytest.mark.parametrize("count", [600, 601, 10_000])
def test_lengths_follow_the_published_spread(count: int) -> None:
    lengths = target_lengths(count)
    assert (len(lengths), min(lengths), max(lengths)) == (count, 48, 449)
    assert statistics.median(lengths) == pytest.approx(94, abs=0.5)
    assert statistics.mean(lengths) == pytest.approx(121, abs=0.5)


def test_every_ticket_has_the_length_that_was_drawn_for_it(tickets: pl.DataFrame) -> None:
    assert sorted(map(count_tokens, texts_of(tickets))) == target_lengths(600)


@pytest.mark.slow
def test_lengths_are_those_of_the_real_tokenizer(tickets: pl.DataFrame, embedded_model: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(embedded_model / "tokenizer.json"))
    for made in (tickets, make_tickets(2000, 1)):
        texts = texts_of(made)
        lengths = [len(encoding.ids) for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
        assert lengths == [count_tokens(text) for text in texts]
        assert sorted(lengths) == target_lengths(len(made))


@pytest.mark.slow
def test_the_stored_token_lengths_are_up_to_date(embedded_model: Path) -> None:
    from tokenizers import Tokenizer

    from samples.measure_tokens import measure

    tokenizer = Tokenizer.from_file(str(embedded_model / "tokenizer.json"))
    assert measure(tokenizer) == token_lengths(), "run python -m samples.measure_tokens"


@pytest.mark.slow
def test_label_names_are_single_tokens_of_the_real_tokenizer(embedded_model: Path) -> None:
    from ticket_engine.models import load_tokenizer
    from ticket_engine.prompts import build_prompt

    prompt = build_prompt(load_tokenizer(embedded_model), read_labels(HERE / "labels.yaml"))
    assert [len(ids) for ids in prompt.label_ids] == [1] * 8


def test_the_labels_file_names_the_labels_of_the_tickets(tickets: pl.DataFrame) -> None:
    names = read_labels(HERE / "labels.yaml").names
    assert set(names) == set(phrases()["labels"])
    assert tickets["label"].value_counts().sort("label").rows() == [(name, 75) for name in sorted(names)]


def test_tickets_have_unique_ids_and_texts_and_some_have_no_subject(tickets: pl.DataFrame) -> None:
    assert tickets.schema == dict.fromkeys(("ticket_id", "subject", "body", "label"), pl.String)
    assert tickets["ticket_id"].is_unique().all()
    assert len(set(texts_of(tickets))) == 600
    assert 0 < tickets["subject"].null_count() < 100
    assert tickets.select("ticket_id", "body", "label").null_count().row(0) == (0, 0, 0)


def test_texts_are_whole_sentences_without_an_unfilled_slot(tickets: pl.DataFrame) -> None:
    for text in texts_of(tickets):
        assert "{" not in text
        assert "  " not in text
        assert text == text.strip()
        assert all(line == line.strip() for line in text.splitlines())


@given(count=st.integers(1, 60), seed=st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_the_same_numbers_give_the_same_tickets(count: int, seed: int) -> None:
    first = make_tickets(count, seed)
    assert len(first) == count
    assert first.equals(make_tickets(count, seed))
    assert sorted(map(count_tokens, texts_of(first))) == target_lengths(count)


def test_another_seed_gives_other_tickets(tickets: pl.DataFrame) -> None:
    assert not set(texts_of(tickets)) & set(texts_of(make_tickets(600, 1)))


def test_words_alone_tell_the_labels_with_enough_examples_but_not_with_few(tickets: pl.DataFrame) -> None:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    texts, labels = texts_of(tickets), tickets["label"].to_list()

    def accuracy(examples: int) -> float:
        model = make_pipeline(TfidfVectorizer(sublinear_tf=True), LogisticRegression(C=10, max_iter=1000))
        return model.fit(texts[:examples], labels[:examples]).score(texts[300:], labels[300:])

    assert accuracy(40) < 0.75
    assert accuracy(300) > 0.9


def test_the_command_writes_a_parquet_file(tmp_path: Path, tickets: pl.DataFrame) -> None:
    output = tmp_path / "new" / "tickets.parquet"
    command = [sys.executable, "-m", "samples.sample_tickets", "--output", str(output)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=HERE.parent)
    assert "600 tickets written" in result.stdout
    assert pl.read_parquet(output).equals(tickets)


def test_the_command_refuses_a_number_of_tickets_below_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "samples.sample_tickets", "--output", str(tmp_path / "x"), "--tickets", "0"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE.parent)
    assert result.returncode == 2
    assert "allowed is 1 or more" in result.stderr
    assert not (tmp_path / "x").exists()


def test_token_lengths_hold_only_words_of_several_tokens() -> None:
    content = json.loads((HERE / "token_lengths.json").read_text(encoding="utf-8"))
    assert all(length > 1 for length in content.values())
