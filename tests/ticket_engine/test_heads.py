"""Heads: stages, files and refusals, on a head fitted to toy tickets with made-up hidden states."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.toy_rows import IDENTITY, LABELS, LAYERS, WORDS, make_label_rows, make_rows
from ticket_engine.errors import HeadError, OutputError
from ticket_engine.head_files import ARRAYS_FILE, TEXT_FILE, claimed_head, head_hash, load_head, save_head
from ticket_engine.head_fitting import FitRule, fit_head
from ticket_engine.heads import (
    Head,
    apply_head,
    check_identity,
    decide_by_text,
    fit_scaling,
    is_decided,
    scaled,
    stage_log_probs,
)
from ticket_engine.lexical import lexical_features
from ticket_engine.ownership import MARK_FILE


@pytest.fixture(scope="module")
def head() -> Head:
    return fit_head(make_rows(300, 0), make_label_rows(), LABELS, rule=FitRule(layers=LAYERS), identity=IDENTITY)


def test_a_head_is_right_where_text_alone_is_not(head: Head) -> None:
    rows = make_rows(400, 1)
    lexical = lexical_features(rows.texts, head.lexicon)
    staged, stage_of = apply_head(head, lexical, rows.hidden)
    text_alone = stage_log_probs(head, 0, lexical, {})
    right = (staged.argmax(1) == rows.label_indices).mean()
    assert right > (text_alone.argmax(1) == rows.label_indices).mean() + 0.1
    assert set(stage_of) == {0, *range(1, len(head.stages))}
    np.testing.assert_allclose(np.exp(staged).sum(1), 1, atol=1e-5)
    assert staged.dtype == np.float32


def test_a_ticket_gets_the_same_alone_and_among_others(head: Head) -> None:
    rows = make_rows(40, 2)
    together, stages = apply_head(head, lexical_features(rows.texts, head.lexicon), rows.hidden)
    for row in range(40):
        one = rows.take(np.array([row]))
        log_probs, stage = apply_head(head, lexical_features(one.texts, head.lexicon), one.hidden)
        np.testing.assert_allclose(log_probs[0], together[row], atol=1e-5)
        assert stage[0] == stages[row]


def test_stages_walked_one_by_one_equal_the_head_applied_at_once(head: Head) -> None:
    rows = make_rows(60, 3)
    whole, stage_of = apply_head(head, lexical_features(rows.texts, head.lexicon), rows.hidden)
    log_probs, decided = decide_by_text(head, rows.texts)
    np.testing.assert_array_equal(decided, stage_of == 0)
    np.testing.assert_array_equal(log_probs[decided], whole[decided])
    for index in range(1, len(head.stages)):
        deeper = stage_log_probs(head, index, lexical_features(rows.texts, head.lexicon), rows.hidden)
        here = stage_of == index
        np.testing.assert_allclose(deeper[here], whole[here], atol=1e-6)
        assert is_decided(head, index, deeper)[here].all()


def test_the_head_says_which_depths_it_needs(head: Head) -> None:
    assert head.stages[0].depth == 0
    assert head.depths == tuple(sorted(head.depths))
    assert {block.depth for block in head.blocks} >= set(head.depths)
    assert max(block.depth for block in head.blocks) == head.depths[-1]


def test_a_missing_block_is_refused_by_name(head: Head) -> None:
    rows = make_rows(3, 4)
    lexical = lexical_features(rows.texts, head.lexicon)
    with pytest.raises(HeadError, match="found nothing"):
        stage_log_probs(head, len(head.stages) - 1, lexical, {})
    narrow = {block: values[:, :5] for block, values in rows.hidden.items()}
    with pytest.raises(HeadError, match="with 12 columns, found 5 columns"):
        stage_log_probs(head, len(head.stages) - 1, lexical, narrow)


def test_a_head_is_read_as_it_was_written(head: Head, tmp_path: Path) -> None:
    save_head(head, tmp_path / "head")
    again = load_head(tmp_path / "head")
    rows = make_rows(50, 5)
    lexical = lexical_features(rows.texts, again.lexicon)
    for ours, theirs in zip(
        apply_head(head, lexical, rows.hidden), apply_head(again, lexical, rows.hidden), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    assert again.labels == head.labels
    assert again.identity == head.identity
    assert again.blocks == head.blocks
    assert dict(again.report) == json.loads(json.dumps(dict(head.report)))
    np.testing.assert_allclose(again.held_out_confidence, head.held_out_confidence)
    np.testing.assert_array_equal(again.held_out_correct, head.held_out_correct)
    assert [path.name for path in sorted((tmp_path / "head").iterdir())] == [
        MARK_FILE,
        TEXT_FILE,
        ARRAYS_FILE,
    ]


def test_no_ticket_text_is_in_the_files(head: Head, tmp_path: Path) -> None:
    save_head(head, tmp_path)
    content = (tmp_path / ARRAYS_FILE).read_bytes() + (tmp_path / TEXT_FILE).read_bytes()
    assert not any(word.encode() in content for words in WORDS.values() for word in words.split())


def test_equal_fits_have_equal_hashes_and_others_not(head: Head, tmp_path: Path) -> None:
    again = fit_head(make_rows(300, 0), make_label_rows(), LABELS, rule=FitRule(layers=LAYERS), identity=IDENTITY)
    other = fit_head(make_rows(300, 1), make_label_rows(), LABELS, rule=FitRule(layers=LAYERS), identity=IDENTITY)
    for name, made in (("a", head), ("b", again), ("c", other)):
        save_head(made, tmp_path / name)
    assert head_hash(tmp_path / "a") == head_hash(tmp_path / "b") != head_hash(tmp_path / "c")


def test_changed_numbers_are_refused(head: Head, tmp_path: Path) -> None:
    save_head(head, tmp_path)
    content = bytearray((tmp_path / ARRAYS_FILE).read_bytes())
    content[-1] ^= 1
    (tmp_path / ARRAYS_FILE).write_bytes(content)
    with pytest.raises(HeadError, match="not those that were written"):
        load_head(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / TEXT_FILE).unlink(), "head.json is missing"),
        (lambda folder: (folder / ARRAYS_FILE).unlink(), "head.safetensors is missing"),
        (lambda folder: (folder / TEXT_FILE).write_text("{"), "cannot be read"),
        (lambda folder: (folder / TEXT_FILE).write_text('{"version": 99}'), "version 99"),
        (lambda folder: (folder / TEXT_FILE).write_text('{"version": 2}'), "damaged"),
    ],
)
def test_a_broken_folder_is_refused_with_the_way_out(head: Head, tmp_path: Path, change, words: str) -> None:
    save_head(head, tmp_path)
    change(tmp_path)
    with pytest.raises(HeadError, match=words):
        load_head(tmp_path)


@pytest.mark.parametrize(
    ("field", "words"),
    [("model_hash", "another model"), ("prompt_hash", "another prompt"), ("labels_hash", "another labels file")],
)
def test_a_head_of_something_else_is_refused(head: Head, field: str, words: str) -> None:
    own = {"model_hash": "model", "prompt_hash": "prompt", "labels_hash": "labels"}
    check_identity(head, **own)
    with pytest.raises(HeadError, match=words):
        check_identity(head, **{**own, field: "other"})


@pytest.mark.parametrize("name", ["mine", ".mine.work"])
@pytest.mark.parametrize("file", ["thesis.txt", "head.json"])
def test_a_folder_that_is_no_head_is_neither_written_over_nor_removed(tmp_path: Path, name: str, file: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / file).write_text("years of work")
    with pytest.raises(OutputError, match="was not made by"), claimed_head(tmp_path / "mine"):
        pass
    assert (tmp_path / name / file).read_text() == "years of work"


def test_two_fits_do_not_write_to_one_folder(tmp_path: Path) -> None:
    with (
        claimed_head(tmp_path / "head") as folder,
        pytest.raises(OutputError, match="Another fit"),
        claimed_head(tmp_path / "head"),
    ):
        pass
    assert not folder.exists()


def test_scaled_rows_have_length_one_and_still_columns_count_nothing() -> None:
    values = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    values[:, 2] = 7
    scaling = fit_scaling(values)
    made = scaled(values, scaling)
    np.testing.assert_allclose(np.linalg.norm(made, axis=1), 1, atol=1e-5)
    assert (made[:, 2] == 0).all()
