import json
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from ticket_engine import schemas, stages
from ticket_engine.bucket_files import BucketPlan
from ticket_engine.bucket_scoring import classify_bucket
from ticket_engine.engine import Engine, load_engine
from ticket_engine.engine_spec import read_spec
from ticket_engine.errors import ScoringError
from ticket_engine.reading import name_in_quarantine, read_tickets
from ticket_engine.results import GatherSummary
from ticket_engine.review import ReviewRule
from ticket_engine.schemas import predictions_schema
from ticket_engine.spot_check import compare
from ticket_engine.spot_sample import choose_sample

SINGLE = ("billing", "delivery", "returns", "account")
BRANCHING = ("account", "account access", "account closure", "billing")


@pytest.fixture
def texts(sample_tickets: pl.DataFrame) -> list[str]:
    """Twelve texts, of which the first and the last are equal."""
    return sample_tickets["body"].to_list()


def run(
    folder: Path, store: Path, *, batch_size: int | None = None, max_buckets: int = 3
) -> tuple[BucketPlan, GatherSummary]:
    """All stages one after the other, as the flow calls them."""
    stages.tokenize(folder)
    stages.find_scored(folder, store)
    plan = stages.plan(folder, batch_size=batch_size, max_buckets=max_buckets)
    for bucket in plan.buckets:
        classify_bucket(bucket, folder, store)
    return plan, stages.gather(folder, store, str(folder / "input.parquet"))


def read_predictions(folder: Path) -> pl.DataFrame:
    return pl.read_parquet(folder / "predictions.parquet", glob=False)


def scores_of(predictions: pl.DataFrame) -> np.ndarray:
    return predictions["log_probs"].struct.unnest().to_numpy()


@pytest.mark.parametrize("labels", [SINGLE, BRANCHING], ids=["single", "branching"])
def test_every_ticket_gets_the_references_answer_in_input_order(
    make_run: Callable[..., Path], tmp_path: Path, texts: list[str], labels: tuple[str, ...]
) -> None:
    folder = make_run(texts, labels=labels, token_budget=120)
    plan, summary = run(folder, tmp_path)
    made = read_predictions(folder)
    assert (summary.predictions, summary.failed) == (12, 0)
    assert sum(summary.label_counts.values()) == 12
    assert tuple(summary.label_counts) == labels
    assert made.schema == predictions_schema("ticket_id", pl.String(), labels)
    assert made["ticket_id"].to_list() == [f"t{index}" for index in range(12)]
    tokens = pl.read_parquet(folder / "tokens.parquet")
    engine = load_engine(folder)
    expected = np.stack([engine.reference(ids.to_numpy()) for ids in tokens["token_ids"]])
    np.testing.assert_allclose(scores_of(made), expected, atol=1e-4)
    assert made["label"].to_list() == [labels[best] for best in expected.argmax(1)]
    assert made["token_length"].equals(tokens["token_length"])
    assert plan.batches > 1
    assert len(plan.buckets) <= 3
    assert made["bucket_index"].is_not_null().all()


def test_equal_texts_are_scored_once_and_answered_each(
    make_run: Callable[..., Path], tmp_path: Path, texts: list[str]
) -> None:
    folder = make_run([*texts, texts[3], texts[0]])
    plan, summary = run(folder, tmp_path)
    assert (plan.tickets, plan.distinct, sum(bucket.tickets for bucket in plan.buckets)) == (14, 11, 11)
    assert summary.predictions == 14
    made = read_predictions(folder)
    for twin, other in ((0, 11), (0, 13), (3, 12)):
        assert made.drop("ticket_id").row(twin) == made.drop("ticket_id").row(other)


def test_a_second_run_over_the_same_tickets_has_no_bucket_and_the_same_answers(
    make_run: Callable[..., Path], tmp_path: Path, texts: list[str]
) -> None:
    first, second = make_run(texts), make_run(list(reversed(texts)))
    run(first, tmp_path)
    stages.tokenize(second)
    found = stages.find_scored(second, tmp_path)
    assert (found.tickets, found.rejected_parts) == (11, 0)
    plan, summary = run(second, tmp_path)
    assert (plan.buckets, plan.stored, plan.batches) == ((), 11, 0)
    assert summary.predictions == 12
    before, after = read_predictions(first), read_predictions(second)
    assert after["bucket_index"].null_count() == 12
    left_out = ("ticket_id", "bucket_index")
    assert after.reverse().drop(left_out).equals(before.drop(left_out))


def test_only_tickets_that_the_store_lacks_are_scored(
    make_run: Callable[..., Path], tmp_path: Path, texts: list[str]
) -> None:
    run(make_run(texts), tmp_path)
    folder = make_run(["Something new.", *texts])
    plan, _ = run(folder, tmp_path)
    assert [bucket.tickets for bucket in plan.buckets] == [1]
    made = read_predictions(folder)
    assert made["bucket_index"].to_list() == [0] + [None] * 12
    engine, tokens = load_engine(folder), pl.read_parquet(folder / "tokens.parquet")
    np.testing.assert_allclose(scores_of(made)[0], engine.reference(tokens["token_ids"][0].to_numpy()), atol=1e-4)


def test_another_model_prompt_or_number_format_finds_nothing_in_the_store(
    make_run: Callable[..., Path], tmp_path: Path, texts: list[str]
) -> None:
    run(make_run(texts), tmp_path)
    for changed in ({"model": "qwen2"}, {"labels": BRANCHING}, {"dtype": "bfloat16"}, {"execution": "padded"}):
        folder = make_run(texts, **changed)
        stages.tokenize(folder)
        assert stages.find_scored(folder, tmp_path).tickets == 0, changed


def test_the_number_format_of_a_store_is_kept_from_night_to_night(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    first = make_run([], dtype="auto", store=str(tmp_path))
    chosen = read_spec(first).dtype
    notes = list((tmp_path / "number-formats").glob("[0-9a-f]*.json"))
    assert [json.loads(note.read_text()) for note in notes] == [{"dtype": chosen}]
    speeds = {speed["dtype"]: speed["tera_flops"] for speed in read_spec(first).probe["measured"]}
    other = "float32" if chosen == "bfloat16" else "bfloat16"
    if speeds[chosen] > 2 * speeds[other]:
        pytest.skip(f"{other} is so slow here that no store would have it")
    notes[0].write_text(json.dumps({"dtype": other}))
    assert read_spec(make_run([], dtype="auto", store=str(tmp_path))).dtype == other
    assert read_spec(make_run([], dtype=chosen, store=str(tmp_path))).dtype == chosen
    assert json.loads(notes[0].read_text()) == {"dtype": other}


def test_scores_of_another_version_of_a_library_are_not_used(make_run: Callable[..., Path]) -> None:
    spec = read_spec(make_run([]))
    assert spec.libraries["torch"] == version("torch")
    assert replace(spec, libraries=spec.libraries | {"torch": "0.1"}).score_key != spec.score_key


def test_a_damaged_part_is_found_and_only_its_tickets_are_scored_again(
    make_run: Callable[..., Path], tmp_path: Path, texts: list[str]
) -> None:
    folder = make_run(texts)
    plan, _ = run(folder, tmp_path, batch_size=1)
    before = read_predictions(folder)
    spec = read_spec(folder)
    damaged = tmp_path / spec.score_key[:32] / f"{plan.buckets[1].content_key}.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-30])
    with pytest.raises(ScoringError, match="bucket 1 are missing or damaged"):
        stages.gather(folder, tmp_path, str(folder / "input.parquet"))
    again = make_run(texts)
    plan_again, _ = run(again, tmp_path, batch_size=1, max_buckets=1)
    assert [bucket.content_key for bucket in plan_again.buckets] == [plan.buckets[1].content_key]
    assert read_predictions(again).drop("bucket_index").equals(before.drop("bucket_index"))


@pytest.mark.parametrize("execution", ["packed", "padded", "sequential"])
@pytest.mark.parametrize("batch_size", [None, 1, 5, 32])
def test_execution_and_batch_size_do_not_change_the_answers(
    make_run: Callable[..., Path], tmp_path: Path, texts: list[str], execution: str, batch_size: int | None
) -> None:
    folder = make_run(texts, execution=execution, labels=BRANCHING)
    plan, _ = run(folder, tmp_path, batch_size=batch_size)
    engine, tokens = load_engine(folder), pl.read_parquet(folder / "tokens.parquet")
    expected = np.stack([engine.reference(ids.to_numpy()) for ids in tokens["token_ids"]])
    np.testing.assert_allclose(scores_of(read_predictions(folder)), expected, atol=1e-4)
    if execution == "sequential" or batch_size == 1:
        assert plan.batches == 11
    elif batch_size == 5:
        assert plan.batches == 3


def test_a_batch_size_of_32_is_the_published_scheme_unless_a_token_budget_is_named_too(
    make_run: Callable[..., Path],
) -> None:
    texts = [f"My parcel number {number} has not arrived. " * 12 for number in range(70)]
    folder = make_run(texts, batch_size=32)
    stages.tokenize(folder)
    plan = stages.plan(folder, batch_size=32, max_buckets=256)
    assert plan.batches == 3
    assert plan.real_positions > 3 * 2048
    folder = make_run(texts, batch_size=32, token_budget=1000)
    stages.tokenize(folder)
    assert stages.plan(folder, batch_size=32, max_buckets=256).batches > 3


def test_the_spot_checks_rescoring_gives_the_reference_beside_each_sampled_prediction(
    make_run: Callable[..., Path], tmp_path: Path, texts: list[str]
) -> None:
    folder = make_run(texts)
    run(folder, tmp_path)
    sample = read_predictions(folder)[[7, 2, 9]]
    made = stages.rescore(folder, sample)
    assert made.drop("reference_label", "reference_log_probs").equals(sample)
    assert made["reference_label"].equals(sample["label"].alias("reference_label"))
    np.testing.assert_allclose(np.array(made["reference_log_probs"].to_list()), scores_of(sample), atol=1e-4)
    engine, tokens = load_engine(folder), pl.read_parquet(folder / "tokens.parquet")
    for row, place in enumerate((7, 2, 9)):
        expected = engine.reference(tokens["token_ids"][place].to_numpy())
        np.testing.assert_array_equal(np.float32(made["reference_log_probs"][row].to_list()), expected)


def test_of_a_bfloat16_run_marked_tickets_are_scored_in_float32_too_by_the_stock_model(
    make_run: Callable[..., Path], make_engine: Callable[..., Engine], tmp_path: Path, texts: list[str]
) -> None:
    folder = make_run(texts, dtype="bfloat16")
    run(folder, tmp_path)
    sample = choose_sample(read_predictions(folder), 12, 0)
    made = stages.rescore(folder, sample)
    exact = made["float32_log_probs"]
    assert exact.is_not_null().to_list() == sample["in_float32"].to_list()
    assert 8 == exact.is_not_null().sum() < len(sample)
    tokens, engine = pl.read_parquet(folder / "tokens.parquet"), make_engine(dtype="float32")
    for ticket, scores in made.filter(exact.is_not_null()).select("ticket_id", "float32_log_probs").iter_rows():
        ids = tokens.filter(pl.col("ticket_id") == ticket)["token_ids"][0].to_numpy()
        np.testing.assert_allclose(scores, engine.reference(ids), atol=1e-5)
    result = compare(made, read_spec(folder).tolerance, 0)
    assert (result.float32_sampled, result.float32_disagreed) == (8, 0)
    assert 0 < result.float32_largest_difference < 0.05
    again = stages.rescore(folder, sample)
    assert again.equals(made)


def test_tickets_that_fail_late_are_in_quarantine_whole_and_every_row_has_one_outcome(
    make_run: Callable[..., Path], poisoned_model: Path, tmp_path: Path, texts: list[str]
) -> None:
    folder = make_run(["  ", *texts, "Die Straße ist gesperrt.", "last"], model=poisoned_model)
    _, summary = run(folder, tmp_path)
    quarantine, made = pl.read_parquet(folder / "quarantine.parquet"), read_predictions(folder)
    failed = [f"t{row}" for row, text in enumerate(["  ", *texts, "Die Straße", "last"]) if "ß" in text]
    assert quarantine.columns == ["ticket_id", "body", "reason"]
    assert quarantine["ticket_id"].to_list() == ["t0", *failed]
    assert quarantine["body"].to_list() == ["  ", "Die Straße ist gesperrt."]
    assert quarantine["reason"].to_list() == ["no text", "scores are not finite"]
    assert (summary.predictions, summary.failed) == (13, 1)
    assert sorted([*made["ticket_id"], *quarantine["ticket_id"]]) == sorted(f"t{row}" for row in range(15))


def test_tickets_that_failed_in_one_run_are_tried_again_in_the_next_and_no_others(
    make_run: Callable[..., Path], poisoned_model: Path, tmp_path: Path, texts: list[str]
) -> None:
    run(make_run([*texts, "Die Straße ist gesperrt."], model=poisoned_model), tmp_path)
    plan, summary = run(make_run([*texts, "Die Straße ist gesperrt."], model=poisoned_model), tmp_path)
    assert (plan.stored, [bucket.tickets for bucket in plan.buckets]) == (11, [1])
    assert (summary.predictions, summary.failed) == (12, 1)


@pytest.mark.parametrize("nothing", [[], ["", "  "]])
def test_a_table_without_tickets_ends_with_empty_predictions(
    make_run: Callable[..., Path], tmp_path: Path, nothing: list[str]
) -> None:
    folder = make_run(nothing)
    plan, summary = run(folder, tmp_path)
    assert (plan.buckets, plan.tickets, summary.predictions) == ((), 0, 0)
    assert read_predictions(folder).schema == predictions_schema("ticket_id", pl.String(), SINGLE)


def test_a_run_whose_folder_has_the_signs_of_a_pattern_in_its_name_reads_its_own_files(
    make_run: Callable[..., Path], tmp_path: Path, texts: list[str]
) -> None:
    folder = make_run(texts).rename(tmp_path / "run [1] *")
    _, summary = run(folder, tmp_path / "store [x] ?")
    assert summary.predictions == 12
    assert len(stages.rescore(folder, read_predictions(folder)[:2])) == 2


def test_a_long_ticket_is_cut_marked_and_scored_as_cut(make_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_run(["Where is my order? " * 100, "Refund?"], max_ticket_tokens=64, truncate="middle")
    run(folder, tmp_path)
    made = read_predictions(folder)
    assert made["is_truncated"].to_list() == [True, False]
    assert made["token_length"][0] <= 64
    engine, tokens = load_engine(folder), pl.read_parquet(folder / "tokens.parquet")
    np.testing.assert_allclose(scores_of(made)[0], engine.reference(tokens["token_ids"][0].to_numpy()), atol=1e-4)


NAMES = sorted(
    {value for name, value in vars(schemas).items() if name.isupper() and isinstance(value, str)}
    - schemas.OUTPUT_COLUMNS
    | {"row", "chosen_for", "in_float32", "bucket_tickets", "outcome", "id", "^.*$", "^a$", "*", "", "a.b", "index"}
)


@pytest.mark.parametrize("name", NAMES)
def test_an_id_or_text_column_of_any_name_goes_through_every_stage(
    make_run: Callable[..., Path], tmp_path: Path, name: str, sample_tickets: pl.DataFrame
) -> None:
    bodies = [*sample_tickets["body"][:6], None]
    for id_column, text_column in ((name, "body"), ("key", name), ("ticket_id", name)):
        if id_column == text_column:
            continue
        folder = make_run([], review_budget=0.5)
        table = pl.DataFrame({id_column: [f"t{n}" for n in range(7)], text_column: bodies, "other": list("abcdefg")})
        table.write_parquet(folder / "input.parquet")
        read_tickets(
            str(folder / "input.parquet"), folder, id_column=id_column, text_columns=(text_column,), limit=None
        )
        stages.tokenize(folder)
        stages.find_scored(folder, tmp_path)
        for bucket in stages.plan(folder, batch_size=None, max_buckets=3).buckets:
            classify_bucket(bucket, folder, tmp_path)
        stages.gather(folder, tmp_path, str(folder / "input.parquet"), ReviewRule(budget=0.5))
        made = read_predictions(folder)
        assert made.columns[0] == id_column
        assert made[id_column].to_list() == [f"t{n}" for n in range(6)]
        review = pl.read_parquet(folder / "review.parquet", glob=False)
        assert len(review) == 3
        text_of = dict(zip(table[id_column], table[text_column], strict=True))
        assert [text_of[key] for key in review[id_column]] == review[text_column].to_list()
        quarantine = pl.read_parquet(folder / "quarantine.parquet", glob=False)
        assert quarantine[name_in_quarantine(id_column, quarantine.columns)].to_list() == ["t6"]
        assert stages.spot_check(folder, 4, 0).agreement == 1.0
