"""Labelled tickets: read, checked, reviewed rows put in, and their hidden states collected."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from ticket_engine import stages
from ticket_engine.engine import load_engine
from ticket_engine.errors import InputError, LabelsError, ScoringError
from ticket_engine.fitting_features import choose_rows, collect_fitting_rows, count_layers, hidden_of, read_fitting_rows
from ticket_engine.heads import LAST, MEAN, Block
from ticket_engine.labelled import GOLD_FILE, hash_rows, read_labelled
from ticket_engine.labels import Label

LABELS = ("billing", "delivery")


def write(path: Path, **columns: list) -> str:
    pl.DataFrame(columns).write_parquet(path)
    return str(path)


def read(source: str, folder: Path, **settings: object):
    chosen = {"id_column": "id", "text_columns": ("body",), "label_column": "label", "labels": LABELS} | settings
    return read_labelled(source, folder, **chosen)


def test_rows_keep_their_label_by_input_place_and_blank_labels_are_none(tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.parquet",
        id=["a", "b", None, "d", "e"],
        body=["one", " ", "three", "four", "five"],
        label=["billing", "billing", "delivery", "delivery", " "],
    )
    summary = read(source, tmp_path)
    assert (summary.rows, summary.tickets, summary.labelled, summary.quarantined) == (5, 3, 2, 2)
    assert summary.label_counts == {"billing": 1, "delivery": 1}
    gold = pl.read_parquet(tmp_path / GOLD_FILE)
    assert gold.rows() == [(0, 0), (3, 1)]


def test_reviewed_rows_stand_in_for_rows_of_the_same_id(tmp_path: Path) -> None:
    source = write(tmp_path / "in.parquet", id=["a", "b"], body=["one", "two"], label=["billing", None])
    add = write(tmp_path / "add.parquet", id=["b", "c"], body=["two", "three"], label=["delivery", "delivery"])
    summary = read(source, tmp_path, add=add)
    assert (summary.rows, summary.replaced, summary.labelled) == (3, 1, 3)
    tickets = pl.read_parquet(tmp_path / "tickets.parquet")
    assert tickets["ticket_id"].to_list() == ["a", "b", "c"]
    assert pl.read_parquet(tmp_path / GOLD_FILE)["label_index"].to_list() == [0, 1, 1]


def test_reviewed_rows_without_a_label_or_a_text_replace_nothing(tmp_path: Path) -> None:
    source = write(tmp_path / "in.parquet", id=["a", "b", "c"], body=["one", "two", "three"], label=["billing"] * 3)
    add = write(
        tmp_path / "add.parquet",
        id=["a", "b", "c", "d"],
        body=["one", " ", "three", "four"],
        label=[None, "delivery", "delivery", " "],
    )
    summary = read(source, tmp_path, add=add)
    assert (summary.rows, summary.replaced, summary.labelled, summary.quarantined) == (3, 1, 3, 0)
    tickets = pl.read_parquet(tmp_path / "tickets.parquet")
    assert tickets["text"].to_list() == ["one", "two", "three"]
    assert pl.read_parquet(tmp_path / GOLD_FILE)["label_index"].to_list() == [0, 0, 1]


def test_reviewed_tickets_without_any_text_column_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "in.parquet", id=["a", "b"], body=["one", "two"], label=["billing", None])
    add = write(tmp_path / "add.parquet", id=["b"], label=["delivery"])
    with pytest.raises(InputError, match="none of the text columns body"):
        read(source, tmp_path, add=add)


def test_labels_that_the_labels_file_lacks_are_named(tmp_path: Path) -> None:
    source = write(tmp_path / "in.parquet", id=["a", "b"], body=["one", "two"], label=["billing", "refund"])
    with pytest.raises(LabelsError, match=r"1 labels .* 'refund'.*Allowed: billing, delivery"):
        read(source, tmp_path)


def test_a_missing_or_numeric_label_column_says_what_is_allowed(tmp_path: Path) -> None:
    source = write(tmp_path / "in.parquet", id=["a"], body=["one"], label=[3])
    with pytest.raises(InputError, match="is Int64"):
        read(source, tmp_path)
    with pytest.raises(InputError, match="no column 'gold' with labels"):
        read(source, tmp_path, label_column="gold")


def test_reviewed_rows_need_the_same_kind_of_id(tmp_path: Path) -> None:
    source = write(tmp_path / "in.parquet", id=["a"], body=["one"], label=["billing"])
    add = write(tmp_path / "add.parquet", id=[1], body=["one"], label=["billing"])
    with pytest.raises(InputError, match="Cast one of them"):
        read(source, tmp_path, add=add)


def test_the_hash_of_rows_ignores_their_order_and_sees_a_changed_label() -> None:
    keys = pl.Series([b"a" * 16, b"b" * 16])
    first = hash_rows(keys, pl.Series([0, 1]))
    assert first == hash_rows(keys.reverse(), pl.Series([1, 0]))
    assert first != hash_rows(keys, pl.Series([1, 1]))


@pytest.fixture
def fitted_folder(make_run) -> Path:
    texts = ["My parcel is late", "I was charged twice", "My parcel is late", "I was charged twice", "Where is it?"]
    folder = make_run(texts, labels=LABELS, execution="packed")
    source = folder / "input.parquet"
    labelled = pl.read_parquet(source).with_columns(
        pl.Series("label", ["delivery", "billing", "delivery", None, None], dtype=pl.String)
    )
    labelled.write_parquet(source)
    read(str(source), folder, id_column="ticket_id")
    stages.tokenize(folder)
    return folder


def test_equal_texts_count_once_and_labelled_ones_come_first(fitted_folder: Path) -> None:
    rows = choose_rows(fitted_folder, most=100, seed=0)
    assert rows["text"].to_list() == ["My parcel is late", "I was charged twice", "Where is it?"]
    assert rows["label_index"].to_list() == [1, 0, -1]
    assert choose_rows(fitted_folder, most=1, seed=0)["label_index"].to_list()[1] == -1


def test_collected_states_equal_those_of_each_ticket_alone(fitted_folder: Path) -> None:
    labels = [Label("billing", "money"), Label("delivery", "")]
    rows = choose_rows(fitted_folder, most=100, seed=0)
    collect_fitting_rows(fitted_folder, labels, (1, 3), rows)
    tickets, label_rows = read_fitting_rows(fitted_folder, labels)
    assert label_rows.texts == ["billing: money", "billing", "money", "delivery"]
    assert label_rows.label_indices.tolist() == [0, 0, 0, 1]
    assert len(label_rows.hidden[Block(1, MEAN)]) == 4
    assert set(tickets.hidden) == {Block(depth, pooling) for depth in (1, 3) for pooling in (MEAN, LAST)}
    engine = load_engine(fitted_folder)
    for row, ids in enumerate(rows["token_ids"]):
        alone = hidden_of(engine, [ids.to_numpy()], (1, 3))
        for block, values in alone.items():
            np.testing.assert_allclose(tickets.hidden[block][row], values[0], atol=1e-5)


def test_text_alone_needs_no_model(fitted_folder: Path) -> None:
    rows = choose_rows(fitted_folder, most=100, seed=0)
    collect_fitting_rows(fitted_folder, [Label("billing", ""), Label("delivery", "")], (), rows)
    assert read_fitting_rows(fitted_folder, [Label("billing", ""), Label("delivery", "")])[0].hidden == {}


def test_hidden_states_that_are_not_finite_are_an_error(fitted_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_engine(fitted_folder)
    true = engine.features

    def broken(ids: list, depths: tuple) -> list:
        features = true(ids, depths)
        features[0].mean[0] = np.nan
        return features

    monkeypatch.setattr(engine, "features", broken)
    with pytest.raises(ScoringError, match="1 of 2 tickets"):
        hidden_of(engine, [np.array([5, 6]), np.array([7])], (1,))


def test_layers_are_those_of_the_configuration(tiny_model) -> None:
    assert count_layers(tiny_model("llama")) == 3
