import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ticket_engine.bucketing import (
    PassCost,
    PlanRule,
    padding_overhead,
    plan_batches,
    plan_buckets,
    positions,
)

UNLIMITED = 2**62

lengths_lists = st.lists(st.integers(1, 60), max_size=200)
runs_of_equal_lengths = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 14)), min_size=1, max_size=4).map(
    lambda runs: [length for length, count in runs for _ in range(count)]
)


def descending(lengths: list[int]) -> np.ndarray:
    return np.sort(np.array(lengths, dtype=np.int64))[::-1]


def batches_of(lengths: np.ndarray, starts: np.ndarray) -> list[np.ndarray]:
    return np.split(lengths, starts[1:]) if len(starts) else []


def cost_of(widths: np.ndarray, cost: PassCost) -> float:
    """What a padded pass of these rows costs, straight from the formula of `PassCost`."""
    width = int(widths.max())
    return cost.per_pass + cost.per_token * len(widths) * width + cost.per_pair * len(widths) * width**2


def cheapest_by_brute_force(widths: np.ndarray, rule: PlanRule) -> float:
    """Least cost over every way to cut the sorted rows into allowed batches."""
    best = [0.0] * (len(widths) + 1)
    for first in range(len(widths) - 1, -1, -1):
        options = []
        for end in range(first + 1, len(widths) + 1):
            rows = end - first
            if rows > 1 and (rows > rule.row_cap or rows * int(widths[first]) > rule.token_budget):
                break
            options.append(cost_of(widths[first:end], rule.cost) + best[end])
        best[first] = min(options)
    return best[0]


def fewest_passes_by_brute_force(widths: np.ndarray, rule: PlanRule) -> int:
    fewest = [0] * (len(widths) + 1)
    for first in range(len(widths) - 1, -1, -1):
        ends = [
            end
            for end in range(first + 1, len(widths) + 1)
            if end == first + 1 or (end - first <= rule.row_cap and widths[first:end].sum() <= rule.token_budget)
        ]
        fewest[first] = 1 + min(fewest[end] for end in ends)
    return fewest[0]


@given(
    lengths=lengths_lists,
    padded=st.booleans(),
    batch_size=st.none() | st.integers(1, 40),
    token_budget=st.integers(1, 400),
    row_cap=st.integers(1, 20),
    extra_tokens=st.integers(0, 9),
)
@settings(deadline=None, max_examples=300)
def test_every_ticket_is_in_exactly_one_batch_and_no_batch_breaks_a_cap(
    lengths: list[int], padded: bool, batch_size: int | None, token_budget: int, row_cap: int, extra_tokens: int
) -> None:
    rule = PlanRule(padded, token_budget, batch_size, row_cap, extra_tokens)
    rows = descending(lengths)
    starts = plan_batches(rows, rule)
    assert starts.dtype == np.int64
    assert list(starts) == sorted(set(starts.tolist()))
    assert (len(rows) == 0) == (len(starts) == 0)
    assert len(starts) == 0 or (starts[0] == 0 and starts[-1] < len(rows))
    for batch in batches_of(rows + extra_tokens, starts):
        assert len(batch) <= (batch_size or row_cap)
        occupied = len(batch) * batch[0] if padded or batch_size else batch.sum()
        assert len(batch) == 1 or occupied <= token_budget


@given(lengths=lengths_lists, extra_tokens=st.integers(0, 30))
@settings(deadline=None, max_examples=50)
def test_a_batch_size_of_32_under_no_budget_is_the_published_scheme(lengths: list[int], extra_tokens: int) -> None:
    rule = PlanRule(padded=True, token_budget=UNLIMITED, batch_size=32, extra_tokens=extra_tokens)
    assert plan_batches(descending(lengths), rule).tolist() == list(range(0, len(lengths), 32))


@given(
    lengths=runs_of_equal_lengths | st.lists(st.integers(1, 60), min_size=1, max_size=24),
    token_budget=st.integers(1, 150) | st.just(UNLIMITED),
    row_cap=st.integers(1, 6),
    extra_tokens=st.integers(0, 3),
    per_pass=st.sampled_from([1e-4, 0.005, 0.1, 1.0]),
    per_pair=st.sampled_from([0.0, 1e-6, 1e-4]),
)
@settings(deadline=None, max_examples=500)
def test_a_planned_padded_table_costs_what_the_best_of_all_plans_costs(
    lengths: list[int], token_budget: int, row_cap: int, extra_tokens: int, per_pass: float, per_pair: float
) -> None:
    rule = PlanRule(
        padded=True,
        token_budget=token_budget,
        row_cap=row_cap,
        extra_tokens=extra_tokens,
        cost=PassCost(per_pass, 0.001, per_pair),
    )
    rows = descending(lengths)
    widths = rows + extra_tokens
    planned = sum(cost_of(batch, rule.cost) for batch in batches_of(widths, plan_batches(rows, rule)))
    assert planned == pytest.approx(cheapest_by_brute_force(widths, rule), rel=1e-9)


def test_a_long_run_of_equal_lengths_between_others_is_planned_at_the_least_cost() -> None:
    # [10, 9], [9, 9], [9, 9], [9, 8] is best: a whole batch set aside must not cut another in two.
    rule = PlanRule(padded=True, token_budget=UNLIMITED, row_cap=2, cost=PassCost(1.0, 0.001, 0.0))
    rows = np.array([10, 9, 9, 9, 9, 9, 9, 8], dtype=np.int64)
    assert plan_batches(rows, rule).tolist() == [0, 2, 4, 6]


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40), budget=st.integers(1, 200), cap=st.integers(1, 9))
@settings(deadline=None, max_examples=200)
def test_a_packed_plan_needs_no_more_passes_than_the_fewest_possible(lengths: list[int], budget: int, cap: int) -> None:
    rule = PlanRule(padded=False, token_budget=budget, row_cap=cap)
    rows = descending(lengths)
    assert len(plan_batches(rows, rule)) == fewest_passes_by_brute_force(rows, rule)


@pytest.mark.parametrize("padded", [True, False])
def test_one_giant_ticket_above_the_budget_is_a_batch_of_its_own(padded: bool) -> None:
    starts = plan_batches(np.array([5000, 10, 10, 10], dtype=np.int64), PlanRule(padded=padded, token_budget=100))
    assert starts.tolist() == [0, 1]


@pytest.mark.parametrize("rule", [PlanRule(True, 100), PlanRule(False, 100), PlanRule(True, 100, batch_size=32)])
def test_an_empty_table_has_no_batches_no_buckets_and_no_padding(rule: PlanRule) -> None:
    nothing = np.zeros(0, dtype=np.int64)
    starts = plan_batches(nothing, rule)
    assert (len(starts), positions(nothing, starts, rule), padding_overhead(nothing, starts)) == (0, 0, 0.0)
    assert len(plan_buckets(starts, 0, 256)) == 0


def test_lengths_that_are_not_sorted_are_refused() -> None:
    with pytest.raises(ValueError, match="longest first"):
        plan_batches(np.array([3, 9], dtype=np.int64), PlanRule(False, 100))


@given(lengths=lengths_lists, padded=st.booleans(), extra_tokens=st.integers(0, 9))
@settings(deadline=None, max_examples=100)
def test_positions_count_every_row_at_the_width_of_its_batch_when_padded_and_at_its_own_when_packed(
    lengths: list[int], padded: bool, extra_tokens: int
) -> None:
    rule = PlanRule(padded, 200, extra_tokens=extra_tokens)
    rows = descending(lengths)
    starts = plan_batches(rows, rule)
    batches = batches_of(rows + extra_tokens, starts)
    expected = sum(len(batch) * batch.max() if padded else batch.sum() for batch in batches)
    assert positions(rows, starts, rule) == expected


def test_padding_overhead_is_padded_tokens_over_real_tokens_minus_one() -> None:
    lengths = np.array([10, 6, 4, 4], dtype=np.int64)
    assert padding_overhead(lengths, np.array([0, 2])) == pytest.approx((2 * 10 + 2 * 4) / 24 - 1)
    assert padding_overhead(lengths, np.array([0, 1, 2])) == 0.0


@given(batches=st.integers(0, 3000), max_buckets=st.integers(1, 300))
@settings(deadline=None, max_examples=200)
def test_buckets_are_at_most_max_buckets_none_empty_in_order_and_of_nearly_equal_batches(
    batches: int, max_buckets: int
) -> None:
    buckets = plan_buckets(np.arange(batches) * 3, batches * 3, max_buckets)
    assert len(buckets) == batches
    if batches:
        counts = np.bincount(buckets)
        assert len(counts) == max_buckets or (len(counts) - 1) ** 2 < batches <= len(counts) ** 2
        assert len(counts) <= max_buckets
        assert counts.min() >= 1
        assert counts.max() - counts.min() <= 1
        assert (np.diff(buckets) >= 0).all()


@pytest.mark.parametrize("padded", [True, False])
def test_a_million_lengths_are_planned_under_the_caps(padded: bool) -> None:
    lengths = np.sort(np.random.default_rng(0).integers(1, 1025, 1_000_000))[::-1]
    rule = PlanRule(padded, token_budget=8192, extra_tokens=6)
    starts = plan_batches(lengths, rule)
    rows = np.diff(starts, append=len(lengths))
    widths = lengths + 6
    assert rows.max() <= rule.row_cap
    assert (rows.sum(), starts[0]) == (1_000_000, 0)
    occupied = rows * widths[starts] if padded else np.add.reduceat(widths, starts)
    assert occupied.max() <= 8192
    assert positions(lengths, starts, rule) / widths.sum() - 1 <= (0.01 if padded else 0)
    assert plan_buckets(starts, len(lengths), 256).max() == 255


def test_planning_tokenizing_and_reading_labels_import_neither_torch_nor_transformers() -> None:
    modules = ("bucketing", "bucket_files", "tokenization", "labels", "prompts", "store", "results", "publish")
    code = (
        "import importlib, sys\n"
        f"for name in {modules}: importlib.import_module('ticket_engine.' + name)\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
