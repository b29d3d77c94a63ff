import json
import logging
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from ticket_engine.engine import Engine, load_engine
from ticket_engine.engine_spec import SPEC_FILE, TOLERANCE, EngineSpec, read_spec
from ticket_engine.errors import LabelsError, ModelError, ScoringError, SettingsError
from ticket_engine.models import load_weights
from ticket_engine.preparation import prepare_engine
from ticket_engine.settings import RunSettings
from ticket_engine.tokenization import load_ticket_tokenizer

SINGLE = ("billing", "delivery", "returns", "account")
BRANCHING = ("account", "account access", "account closure", "billing")
LONGEST = 512

ticket_lengths = st.lists(
    st.integers(1, 40) | st.sampled_from([127, 128, 129, 200, 256, 257, LONGEST]), min_size=1, max_size=6
)


def random_tickets(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    """Token ids of tickets, longest first."""
    random = np.random.default_rng(seed)
    return [random.integers(3, 500, length).astype(np.uint32) for length in sorted(lengths, reverse=True)]


def whole_prompt(engine: Engine, ids: np.ndarray) -> list[int]:
    return [*engine.spec.prompt.prefix_ids, *ids.tolist(), *engine.spec.prompt.ending_ids]


def naive(engine: Engine, model, tickets: list[np.ndarray], score: Callable[..., np.ndarray]) -> np.ndarray:
    return np.stack([score(model, whole_prompt(engine, ids), engine.spec.prompt.label_ids) for ids in tickets])


@pytest.mark.parametrize("labels", [SINGLE, BRANCHING], ids=["single", "branching"])
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["prefix", "whole"])
@given(lengths=ticket_lengths, seed=st.integers(0, 10_000), data=st.data())
@settings(deadline=None, max_examples=6)
def test_packed_padded_sequential_and_reference_agree_for_any_lengths_and_any_batches(
    each_model: Path,
    make_engine: Callable[..., Engine],
    naive_scores: Callable[..., np.ndarray],
    labels: tuple[str, ...],
    prefix_cache: bool,
    lengths: list[int],
    seed: int,
    data: st.DataObject,
) -> None:
    tickets = random_tickets(lengths, seed)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(tickets) - 1)))) if len(tickets) > 1 else []
    sequential = make_engine(each_model, labels=labels, execution="sequential")
    expected = sequential.score(tickets)
    assert (sequential.trie.nodes == 0) == (labels is SINGLE)
    for execution in ("packed", "padded"):
        engine = make_engine(each_model, labels=labels, execution=execution, prefix_cache=prefix_cache)
        together = engine.score(tickets)
        assert together.dtype == np.float32
        np.testing.assert_allclose(together, expected, atol=1e-4, rtol=0)
        apart = [engine.score(tickets[a:b]) for a, b in zip([0, *cuts], [*cuts, len(tickets)], strict=True)]
        np.testing.assert_allclose(np.concatenate(apart), together, atol=1e-4, rtol=0)
        np.testing.assert_array_equal(engine.reference(tickets[0]), expected[0])
    shortest = tickets[-1:]
    np.testing.assert_allclose(expected[-1:], naive(sequential, sequential.stock, shortest, naive_scores), atol=1e-4)


@pytest.mark.parametrize("labels", [SINGLE, BRANCHING], ids=["single", "branching"])
def test_every_score_row_is_a_distribution_over_the_labels_and_far_from_uniform(
    each_model: Path, make_engine: Callable[..., Engine], labels: tuple[str, ...]
) -> None:
    made = make_engine(each_model, labels=labels).score(random_tickets([200, 30, 30, 5]))
    np.testing.assert_allclose(np.exp(made).sum(1), 1, atol=1e-6)
    assert np.ptp(np.exp(made), axis=0).max() > 0.1
    assert np.exp(made).max() > 0.5


@pytest.mark.parametrize("execution", ["packed", "padded"])
def test_the_prefix_cache_does_not_change_scores(
    each_model: Path, make_engine: Callable[..., Engine], execution: str
) -> None:
    with_prefix = make_engine(each_model, execution=execution)
    without = make_engine(each_model, execution=execution, prefix_cache=False)
    tickets = random_tickets([300, 41, 41, 41, 1])
    # A padded pass of a model with sliding layers goes without: its cache would slide.
    expected_length = (
        0 if execution == "padded" and "gemma3" in each_model.name else len(with_prefix.spec.prompt.prefix_ids)
    )
    assert (with_prefix.prefix.length, without.prefix.length) == (expected_length, 0)
    np.testing.assert_allclose(with_prefix.score(tickets), without.score(tickets), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gemma2", {SINGLE: "packed", BRANCHING: "packed"}),
        ("gpt2", {SINGLE: "packed", BRANCHING: "packed"}),
        ("cohere", {SINGLE: "packed", BRANCHING: "packed"}),
        ("granite", {SINGLE: "packed", BRANCHING: "packed"}),
        ("qwen3_moe", {SINGLE: "packed", BRANCHING: "packed"}),
        ("mistral_short_window", {SINGLE: "padded", BRANCHING: "sequential"}),
        ("gemma3_short_window", {SINGLE: "padded", BRANCHING: "sequential"}),
        ("bloom", {SINGLE: "padded", BRANCHING: "sequential"}),
        ("mamba", {SINGLE: "sequential", BRANCHING: "sequential"}),
    ],
)
@pytest.mark.parametrize("labels", [SINGLE, BRANCHING], ids=["single", "branching"])
def test_other_decoders_run_the_fastest_way_that_equals_naive_scoring(
    name: str,
    expected: dict[tuple[str, ...], str],
    labels: tuple[str, ...],
    tiny_model: Callable[[str], Path],
    make_run: Callable[..., Path],
    naive_scores: Callable[..., np.ndarray],
) -> None:
    engine = load_engine(make_run([], model=name, labels=labels))
    assert engine.spec.execution == expected[labels]
    tickets = random_tickets([150, 30, 30, 1])
    own = AutoModelForCausalLM.from_pretrained(tiny_model(name), dtype=torch.float32)
    np.testing.assert_allclose(engine.score(tickets), naive(engine, own, tickets, naive_scores), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["nemotron", "diffllama", "jetmoe"])
def test_a_model_with_which_packing_turns_out_not_to_work_falls_back_and_says_so(
    make_run: Callable[..., Path], name: str
) -> None:
    engine = load_engine(make_run([], model=name))
    assert engine.spec.execution == "padded"
    assert "a trial in a packed row" in engine.spec.execution_reason
    tickets = random_tickets([80, 20, 1])
    expected = np.stack([engine.reference(ids) for ids in tickets])
    np.testing.assert_allclose(engine.score(tickets), expected, atol=1e-4, rtol=0)
    with pytest.raises(ModelError, match=r"Execution packed is not exact .* Use auto or padded"):
        make_run([], model=name, execution="packed")


def test_loading_refuses_an_execution_that_is_not_exact_for_the_real_weights(make_run: Callable[..., Path]) -> None:
    """What the trial of a tiny model cannot see shows when the weights are there."""
    folder = make_run([], model="diffllama")
    spec = json.loads((folder / SPEC_FILE).read_text())
    (folder / SPEC_FILE).write_text(json.dumps(spec | {"execution": "packed"}))
    with pytest.raises(ModelError, match="Use --execution padded or sequential"):
        load_engine(folder)


def test_a_window_shorter_than_the_prompt_falls_back_with_one_log_line(
    make_run: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "ticket_engine.preparation"):
        spec = read_spec(make_run([], model="gemma3_short_window"))
        assert (spec.execution, spec.prefix_cache) == ("padded", False)
    lines = [record.getMessage() for record in caplog.records if record.name == "ticket_engine.preparation"]
    assert len(lines) == 1
    assert lines[0].startswith("Execution padded instead of packed: its sliding window of 64 tokens is shorter")
    caplog.clear()
    with caplog.at_level(logging.INFO, "ticket_engine.preparation"):
        assert read_spec(make_run([], model="gemma3")).execution == "packed"
    assert [record for record in caplog.records if record.name == "ticket_engine.preparation"] == []


@pytest.mark.parametrize(("labels", "execution"), [(SINGLE, "packed"), (BRANCHING, "packed"), (BRANCHING, "padded")])
def test_an_execution_that_is_asked_for_but_not_exact_is_an_error(
    make_run: Callable[..., Path], labels: tuple[str, ...], execution: str
) -> None:
    allowed = "padded" if labels is SINGLE else "sequential"
    with pytest.raises(
        ModelError, match=f"Execution {execution} is not exact .* sliding window .* Use auto or {allowed}"
    ):
        make_run([], model="gemma3_short_window", labels=labels, execution=execution)


def test_a_slower_execution_than_the_best_may_always_be_asked_for(make_run: Callable[..., Path]) -> None:
    for execution in ("padded", "sequential"):
        assert read_spec(make_run([], execution=execution)).execution == execution
    assert not read_spec(make_run([], execution="sequential")).prefix_cache


def test_prompt_and_longest_ticket_must_fit_the_models_positions(
    make_run: Callable[..., Path], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    short = shutil.copytree(tiny_model("llama"), tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 600}))
    with pytest.raises(SettingsError) as caught:
        make_run([], model=short, max_ticket_tokens=600)
    most = int(str(caught.value).split("to at most ")[1].split(",")[0])
    assert "the model has 600 positions" in str(caught.value)
    folder = make_run([], model=short, max_ticket_tokens=most)
    spec = read_spec(folder)
    assert len(spec.prompt.prefix_ids) + most + len(spec.prompt.ending_ids) + 1 == 600
    engine = load_engine(folder)
    tickets = random_tickets([most])
    np.testing.assert_allclose(engine.score(tickets)[0], engine.reference(tickets[0]), atol=1e-4)
    with pytest.raises(SettingsError):
        make_run([], model=short, max_ticket_tokens=most + 1)


class Cramped(Engine):
    """An engine on a machine with memory for so many tickets a pass."""

    room = 3
    complaint = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."

    def _score(self, tickets: list[np.ndarray]) -> torch.Tensor:
        self.passes.append(len(tickets))
        if len(tickets) > self.room:
            raise RuntimeError(self.complaint)
        return super()._score(tickets)


def cramped(make_engine: Callable[..., Engine], room: int) -> Cramped:
    whole = make_engine("llama")
    engine = Cramped(whole.spec, whole.stock)
    engine.passes, engine.room = [], room
    return engine


def test_out_of_memory_halves_the_batch_and_only_that_batch(
    make_engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    engine = cramped(make_engine, 3)
    big, small = random_tickets([50, 40, 30, 30, 20, 10, 5], 1), random_tickets([9, 8, 7], 2)
    expected = make_engine("llama")
    np.testing.assert_allclose(engine.score(big), expected.score(big), atol=1e-4, rtol=0)
    assert engine.passes == [7, 3, 4, 2, 2]
    assert [record.getMessage() for record in caplog.records] == [
        "Out of memory with 7 tickets in a pass: halved",
        "Out of memory with 4 tickets in a pass: halved",
    ]
    engine.passes.clear()
    np.testing.assert_array_equal(engine.score(small), expected.score(small))
    assert engine.passes == [3]


def test_a_single_ticket_that_does_not_fit_and_any_other_error_are_not_swallowed(
    make_engine: Callable[..., Engine],
) -> None:
    engine = cramped(make_engine, 0)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        engine.score(random_tickets([5, 4, 3]))
    assert engine.passes == [3, 1]
    engine.complaint = "mat1 and mat2 shapes cannot be multiplied"
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        engine.score(random_tickets([5, 4, 3]))
    assert engine.passes == [3, 1, 3]


@pytest.mark.parametrize("execution", ["packed", "padded", "sequential"])
def test_weights_that_are_not_finite_are_an_error_and_never_a_label(
    make_engine: Callable[..., Engine], tiny_model: Callable[[str], Path], execution: str
) -> None:
    spec = make_engine("llama", execution=execution).spec
    model = load_weights(tiny_model("llama"), "float32")
    model.model.layers[1].self_attn.v_proj.weight[3, 3] = float("nan")
    engine = Engine(spec, model)
    with pytest.raises(ScoringError, match=r"\d of \d tickets"):
        engine.score(random_tickets([9, 8]))


def test_a_model_whose_weights_are_not_finite_does_not_load(
    tiny_model: Callable[[str], Path], make_run: Callable[..., Path], tmp_path: Path
) -> None:
    model = load_weights(tiny_model("llama"), "float32")
    model.model.norm.weight[0] = float("nan")
    folder = tmp_path / "broken"
    shutil.copytree(tiny_model("llama"), folder)
    model.save_pretrained(folder)
    with pytest.raises(ScoringError, match="not finite"):
        load_engine(make_run([], model=folder))


def test_one_ticket_with_scores_that_are_not_finite_does_not_touch_the_others(
    make_engine: Callable[..., Engine], tiny_model: Callable[[str], Path]
) -> None:
    spec = make_engine("qwen3").spec
    model = load_weights(tiny_model("qwen3"), "float32")
    model.model.embed_tokens.weight[499] = float("nan")
    engine = Engine(spec, model)
    good = random_tickets([9, 8, 7])
    good = [np.where(ids == 499, 400, ids) for ids in good]
    with pytest.raises(ScoringError, match="1 of 4 tickets"):
        engine.score([*good, np.array([5, 499, 6])])
    np.testing.assert_allclose(engine.score(good), make_engine("qwen3").score(good), atol=1e-4)


def test_the_spec_is_read_back_as_it_was_prepared(
    make_run: Callable[..., Path], tiny_model: Callable[[str], Path], labels_file: Callable[..., Path], tmp_path: Path
) -> None:
    made = RunSettings(
        input="none", labels=str(labels_file(*BRANCHING)), output="none", model=str(tiny_model("qwen2")), threads=1
    )
    spec = prepare_engine(made, tmp_path / "new")
    assert read_spec(tmp_path / "new") == spec
    assert spec.labels == BRANCHING
    assert (tmp_path / "new" / "tokenizer.json").is_file()
    assert len(spec.model_hash) == len(spec.labels_hash) == len(spec.score_key) == 64
    json.dumps(spec.probe)


def test_the_score_key_changes_with_all_that_decides_a_score_and_with_nothing_else(
    make_run: Callable[..., Path], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    base = read_spec(make_run([]))
    other_weights = tmp_path / "other"
    shutil.copytree(tiny_model("llama"), other_weights)
    model = load_weights(other_weights, "float32")
    model.lm_head.weight[0, 0] += 1
    model.save_pretrained(other_weights)
    changed = [
        read_spec(make_run([], model="qwen2")),
        read_spec(make_run([], model=other_weights)),
        read_spec(make_run([], labels=BRANCHING)),
        read_spec(make_run([], labels=tuple(reversed(SINGLE)))),
        read_spec(make_run([], dtype="bfloat16")),
        read_spec(make_run([], execution="padded")),
        read_spec(make_run([], prefix_cache=False)),
    ]
    assert len({spec.score_key for spec in [base, *changed]}) == len(changed) + 1
    same = [
        read_spec(make_run([])),
        read_spec(make_run([], threads=2, workers=1)),
        read_spec(make_run([], token_budget=77)),
        read_spec(make_run([], max_ticket_tokens=100, truncate="middle")),
    ]
    assert {spec.score_key for spec in same} == {base.score_key}


def test_errors_of_labels_and_model_come_before_anything_is_loaded(
    tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    common = {"input": "none", "output": "none", "threads": 1}
    with pytest.raises(LabelsError):
        prepare_engine(RunSettings(labels=str(tmp_path / "none"), model=str(tiny_model("llama")), **common), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_engine_is_loaded_once_a_process_whoever_asks_first(make_run: Callable[..., Path]) -> None:
    folder, same = make_run([]), make_run([])
    engines: list[Engine] = []
    threads = [threading.Thread(target=lambda: engines.append(load_engine(folder))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engines.append(load_engine(same))
    assert len({id(engine) for engine in engines[:4]}) == len({id(engine.stock) for engine in engines}) == 1
    assert load_engine(make_run([], labels=BRANCHING)) is not engines[0]


def test_the_packed_view_shares_the_weights_and_leaves_the_stock_model_as_it_is(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine("gemma3")
    stock, view = engine.stock, engine.view
    assert {id(weight) for weight in view.parameters()} == {id(weight) for weight in stock.parameters()}
    assert stock.config._attn_implementation != view.config._attn_implementation
    before = engine.reference(random_tickets([20])[0])
    engine.score(random_tickets([20, 10]))
    np.testing.assert_array_equal(engine.reference(random_tickets([20])[0]), before)


def test_scores_from_several_threads_at_once_are_the_same(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine("gemma3", labels=BRANCHING)
    batches = [random_tickets([40 + number, 30, 30, number + 1], number) for number in range(8)]
    expected = [engine.score(batch) for batch in batches]
    made: dict[int, np.ndarray] = {}

    def work(number: int) -> None:
        for _ in range(5):
            made[number] = engine.score(batches[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, scores in enumerate(expected):
        np.testing.assert_array_equal(made[number], scores)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("labels", [("billing", "delivery", "returns"), BRANCHING], ids=["single", "branching"])
def test_the_real_model_agrees_with_its_reference_and_with_naive_scoring_within_the_tolerance(
    make_run: Callable[..., Path],
    embedded_model: Path,
    naive_scores: Callable[..., np.ndarray],
    sample_tickets: pl.DataFrame,
    dtype: str,
    labels: tuple[str, ...],
) -> None:
    folder = make_run([], model=embedded_model, labels=labels, dtype=dtype)
    spec, model = read_spec(folder), load_weights(embedded_model, dtype)
    tokenizer = load_ticket_tokenizer(
        folder / "tokenizer.json", spec.prompt, max_ticket_tokens=spec.max_ticket_tokens, truncate=spec.truncate
    )
    encoded = tokenizer.encode(sample_tickets["body"].to_list()[:4])
    tickets = sorted(np.split(encoded.flat, np.cumsum(encoded.lengths)[:-1]), key=len, reverse=True)
    sequential = Engine(replace(spec, execution="sequential", prefix_cache=False), model)
    expected = sequential.score(tickets)
    variants = [("packed", True), ("packed", False), ("padded", True), ("padded", False)]
    for execution, prefix_cache in variants:
        engine = Engine(replace(spec, execution=execution, prefix_cache=prefix_cache), model)
        assert_within_tolerance(engine.score(tickets), expected, dtype)
        assert_within_tolerance(engine.score(tickets[1:2]), expected[1:2], dtype)
    oracle = naive(sequential, model, tickets[1:2], naive_scores)
    assert_within_tolerance(oracle, expected[1:2], dtype)


def assert_within_tolerance(made: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    """In float32 every log-probability; in bfloat16, where unlikely labels move more, the likely ones."""
    counted = np.exp(expected) >= (0.0 if dtype == "float32" else 0.25)
    assert np.abs(made - expected)[counted].max() <= TOLERANCE[dtype]
    assert np.abs(np.exp(made) - np.exp(expected)).max() <= TOLERANCE[dtype]


def test_extra_tokens_are_what_a_pass_computes_for_each_ticket_besides_its_own(make_run: Callable[..., Path]) -> None:
    spec: EngineSpec = read_spec(make_run([], labels=BRANCHING))
    ending = len(spec.prompt.ending_ids)
    assert spec.extra_tokens == ending + 4  # account, account access, account closure, billing
    assert read_spec(make_run([])).extra_tokens == len(read_spec(make_run([])).prompt.ending_ids)
    whole = read_spec(make_run([], prefix_cache=False))
    assert whole.extra_tokens == len(whole.prompt.prefix_ids) + len(whole.prompt.ending_ids)


def test_a_second_run_in_one_process_has_its_own_spec_on_the_same_weights(make_run: Callable[..., Path]) -> None:
    first, second = make_run([], token_budget=111), make_run([], token_budget=222)
    one, two = load_engine(first), load_engine(second)
    assert (one.spec.token_budget, two.spec.token_budget) == (111, 222)
    assert one.stock is two.stock
    assert load_engine(second) is two
