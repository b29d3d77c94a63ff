import json
from pathlib import Path

import polars as pl
import pytest

from ticket_engine.answers import read_answers
from ticket_engine.errors import LabelsError
from ticket_engine.labelled import read_labelled
from ticket_engine.labels import DEFAULT_INSTRUCTION, Label, LabelSet, read_labels

TWO = "labels:\n- name: billing\n  description: invoices\n- name: account_access\n  description: logins\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "labels.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_labels_file_gives_names_texts_and_descriptions_in_its_order(tmp_path: Path) -> None:
    labels = read_labels(write(tmp_path, TWO))
    assert labels.names == ("billing", "account_access")
    assert [label.text for label in labels.labels] == ["billing", "account access"]
    assert [label.description for label in labels.labels] == ["invoices", "logins"]
    assert labels.instruction == DEFAULT_INSTRUCTION


def test_instruction_and_metadata_may_be_given_and_line_breaks_in_descriptions_become_spaces(tmp_path: Path) -> None:
    text = "instruction: |\n  Sort the mail.\nmetadata: {owner: {team: 3}}\n"
    text += "labels:\n- name: a\n  description: |\n    one\n    two\n- name: b\n"
    labels = read_labels(write(tmp_path, text))
    assert labels.instruction == "Sort the mail."
    assert labels.labels == (Label("a", "one two"), Label("b", ""))


def test_examples_belong_to_their_label_and_change_the_hash(tmp_path: Path) -> None:
    text = "labels:\n- name: a\n  examples:\n  - one\n    two\n  - three\n- name: b\n"
    labels = read_labels(write(tmp_path, text))
    assert [label.examples for label in labels.labels] == [("one two", "three"), ()]
    other = read_labels(write(tmp_path, text.replace("three", "four")))
    assert other.content_hash != labels.content_hash


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("labels:\n- name: a\n", "labels: List should have at least 2"),
        ("labels: []\n", "labels"),
        ("instruction: x\n", "labels: Field required"),
        (TWO + "extra: 1\n", "extra"),
        ("labels:\n- {name: a, examples: ['']}\n- {name: b}\n", "labels.0.examples.0"),
        ("labels:\n- {name: a, examples: where}\n- {name: b}\n", "labels.0.examples"),
        ("labels:\n- {name: a, colour: red}\n- {name: b}\n", "labels.0.colour"),
        ("labels:\n- {description: x}\n- {name: b}\n", "labels.0.name"),
        ("labels:\n- {name: ''}\n- {name: b}\n", "labels.0.name"),
        ("labels:\n- {name: 3}\n- {name: b}\n", "labels.0.name"),
        ("labels: [a, b]\n", "labels.0"),
        (TWO + "instruction: ''\n", "instruction"),
        (TWO + "metadata: 3\n", "metadata"),
        ("", "top level"),
        ("- a\n- b\n", "top level"),
        ("labels: [", "is not YAML"),
        ("labels:\n- {name: a}\n- {name: a}\n", "doubles the name 'a'"),
        ("labels:\n- {name: a_b}\n- {name: a b}\n", "doubles the text 'a b'"),
    ],
)
def test_a_labels_file_that_is_not_usable_is_an_error_that_says_where(tmp_path: Path, text: str, found: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(LabelsError) as caught:
        read_labels(path)
    assert found in str(caught.value)
    assert str(path) in str(caught.value)
    assert str(caught.value).count("\n") == 0


def test_a_missing_file_a_folder_and_a_binary_file_are_errors(tmp_path: Path) -> None:
    with pytest.raises(LabelsError, match="No labels file at"):
        read_labels(tmp_path / "none.yaml")
    with pytest.raises(LabelsError, match="cannot be read"):
        read_labels(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(LabelsError, match="cannot be read"):
        read_labels(tmp_path / "binary.yaml")


def test_the_content_hash_changes_with_every_part_that_the_prompt_shows() -> None:
    base = LabelSet((Label("a", "x"), Label("b", "y")))
    others = [
        LabelSet((Label("a", "x"), Label("c", "y"))),
        LabelSet((Label("a", "x"), Label("b", "z"))),
        LabelSet((Label("b", "y"), Label("a", "x"))),
        LabelSet(base.labels, "Another instruction"),
    ]
    hashes = {labels.content_hash for labels in [base, *others]}
    assert len(hashes) == 5
    assert LabelSet((Label("a", "x"), Label("b", "y"))).content_hash == base.content_hash


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("account access", "account  access"),
        ("account access", "account_access "),
        ("billing", "Billing"),
        ("billing", "bill\u200bing"),
        ("billing", "billing\u00ad"),
        ("caf\u00e9", "cafe\u0301"),
        ("stra\u00dfe", "STRASSE"),
        ("ticket", "\uff54icket"),
    ],
)
def test_names_that_people_cannot_tell_apart_are_refused(tmp_path: Path, first: str, second: str) -> None:
    text = json.dumps({"labels": [{"name": first}, {"name": second}]})
    with pytest.raises(LabelsError, match=r"differ only by|doubles the") as caught:
        read_labels(write(tmp_path, text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["bil\nling", "bil\u2028ling", "bil\x07ling", "\u200b", " \u00a0 "])
def test_a_name_with_a_line_break_or_without_anything_to_see_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(LabelsError, match=r"control character or line break|nothing that can be seen") as caught:
        read_labels(write(tmp_path, json.dumps({"labels": [{"name": name}, {"name": "b"}]})))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        TWO + TWO,
        "labels:\n- name: a\n  name: c\n- name: b\n",
        "labels:\n- {name: a, description: x, description: y}\n- name: b\n",
        TWO + "metadata: {a: 1, a: 2}\n",
    ],
)
def test_a_key_that_stands_twice_is_refused_and_not_silently_the_last_one(tmp_path: Path, text: str) -> None:
    with pytest.raises(LabelsError, match="stands twice"):
        read_labels(write(tmp_path, text))


def test_white_space_around_a_name_is_no_part_of_it_in_any_reader(tmp_path: Path) -> None:
    labels = read_labels(write(tmp_path, "labels:\n- name: 'billing '\n- name: ' account'\n"))
    assert labels.names == ("billing", "account")
    table = pl.DataFrame({"ticket_id": ["a", "b"], "body": ["x", "y"], "label": ["billing ", "\u00a0account"]})
    table.write_parquet(tmp_path / "answers.parquet")
    summary = read_labelled(
        str(tmp_path / "answers.parquet"),
        tmp_path,
        id_column="ticket_id",
        text_columns=("body",),
        label_column="label",
        labels=labels.names,
    )
    assert summary.label_counts == {"billing": 1, "account": 1}
    scores = pl.struct(billing=pl.lit(-0.1, pl.Float32), account=pl.lit(-2.4, pl.Float32)).alias("log_probs")
    made = table.select(
        "ticket_id", pl.Series("label", labels.names), pl.lit(0.9, pl.Float32).alias("probability"), scores
    )
    made.write_parquet(tmp_path / "predictions.parquet")
    answers = read_answers(
        str(tmp_path / "predictions.parquet"),
        str(tmp_path / "answers.parquet"),
        id_column="ticket_id",
        gold_column="label",
    )
    assert answers.joined["gold"].to_list() == answers.joined["label"].to_list()
    assert answers.labels == labels.names
