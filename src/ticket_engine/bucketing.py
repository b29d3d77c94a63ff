"""Which tickets share a forward pass, and which passes share a task: planned before a model runs."""

import math
from dataclasses import dataclass

import numpy as np

PUBLISHED_BATCH_SIZE = 32


@dataclass(frozen=True, slots=True)
class PassCost:
    """Seconds of a forward pass: ``per_pass + per_token * rows * width + per_pair * rows * width**2``.

    ``width`` is the longest length of the pass plus what stands in front of it in attention.
    """

    per_pass: float = 0.01
    per_token: float = 0.0004
    per_pair: float = 1e-7


@dataclass(frozen=True, slots=True)
class PlanRule:
    """How tickets are put into batches.

    Attributes:
        padded: Every row of a batch costs as much as its longest; packed rows cost their own length.
        batch_size: Exactly so many rows a batch (the published scheme), or None to plan.
        token_budget: Most token positions of a pass, padding included.
        row_cap: Most rows of a pass.
        extra_tokens: Positions that every row has on top of the ticket's length (ending, label nodes).
        cost: What a planned padded pass is assumed to cost.
    """

    padded: bool
    token_budget: int
    batch_size: int | None = None
    row_cap: int = 1024
    extra_tokens: int = 0
    cost: PassCost = PassCost()


def plan_batches(lengths: np.ndarray, rule: PlanRule) -> np.ndarray:
    """Start of every batch in a table sorted longest first, int64, ascending, beginning with 0.

    A single ticket above the token budget is a batch of its own.

    Args:
        lengths: Token lengths, descending.
        rule: How to plan.
    """
    if not len(lengths):
        return np.zeros(0, dtype=np.int64)
    if (np.diff(lengths) > 0).any():
        raise ValueError("lengths must be sorted, longest first")
    widths = lengths.astype(np.int64) + rule.extra_tokens
    if rule.batch_size is not None:
        return _fixed(widths, rule)
    return _cheapest(widths, rule) if rule.padded else _filled(widths, rule)


def _fixed(widths: np.ndarray, rule: PlanRule) -> np.ndarray:
    """Batches of ``batch_size`` rows, cut shorter only where they would break the token budget."""
    starts, start = [], 0
    while start < len(widths):
        starts.append(start)
        start += min(rule.batch_size, max(1, rule.token_budget // int(widths[start])))
    return np.array(starts, dtype=np.int64)


def _filled(widths: np.ndarray, rule: PlanRule) -> np.ndarray:
    """Batches as full as budget and row cap allow; without padding, fewest passes are cheapest."""
    before = np.concatenate([[0], np.cumsum(widths)])
    starts, start = [], 0
    while start < len(widths):
        starts.append(start)
        end = int(np.searchsorted(before, before[start] + rule.token_budget, side="right")) - 1
        start = min(max(end, start + 1), start + rule.row_cap)
    return np.array(starts, dtype=np.int64)


def _cheapest(widths: np.ndarray, rule: PlanRule) -> np.ndarray:
    """Batches of least total cost, by dynamic programming from the shortest ticket up.

    ``best[i] = min over r of cost(r rows as wide as widths[i]) + best[i + r]``. In a long run of equal
    widths only whole batches without padding can be best away from its ends, so such batches are set
    aside first; what is left is small whatever the table's size.
    """
    kept, cuts, sizes = _set_aside(widths, rule)
    left = widths[kept]
    caps = np.maximum(1, np.minimum(rule.row_cap, rule.token_budget // left))
    rows = np.arange(1, int(caps.max()) + 1)
    best = np.zeros(len(left) + 1)
    choice = np.ones(len(left), dtype=np.int64)
    for index in range(len(left) - 1, -1, -1):
        limit = min(int(caps[index]), len(left) - index)
        width = float(left[index])
        per_row = rule.cost.per_token * width + rule.cost.per_pair * width * width
        totals = rule.cost.per_pass + per_row * rows[:limit] + best[index + 1 : index + 1 + limit]
        pick = int(totals.argmin())
        best[index], choice[index] = totals[pick], pick + 1
    starts, index = [], 0
    while index < len(left):
        starts.append(index)
        index += int(choice[index])
    return _put_back(np.array(starts, dtype=np.int64), len(left), cuts, sizes)


def _set_aside(widths: np.ndarray, rule: PlanRule) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Indexes of the rows to plan, and the whole batches of one width cut out of long runs between them.

    Each batch is given by the number of planned rows before it, int64, and its rows, int64.
    """
    edges = np.flatnonzero(np.diff(widths, prepend=widths[0] + 1))
    counts = np.diff(edges, append=len(widths))
    caps = np.maximum(1, np.minimum(rule.row_cap, rule.token_budget // widths[edges]))
    batches = np.maximum(0, counts // caps - 2)
    keep = np.ones(len(widths), dtype=bool)
    for first, rows in zip((edges + caps).tolist(), (batches * caps).tolist(), strict=True):
        keep[first : first + rows] = False
    before = edges + caps - (np.cumsum(batches * caps) - batches * caps)
    return np.flatnonzero(keep), np.repeat(before, batches), np.repeat(caps, batches)


def _put_back(starts: np.ndarray, rows: int, cuts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Starts in the full table: what was set aside follows the batch at whose end, or inside which, it was cut.

    All rows around a cut have the same width, so it does not matter which of them a batch holds.
    """
    ends = np.append(starts[1:], rows)
    every_size = np.insert(ends - starts, np.searchsorted(ends, cuts) + 1, sizes)
    return np.cumsum(every_size) - every_size


def positions(lengths: np.ndarray, starts: np.ndarray, rule: PlanRule) -> int:
    """Token positions that a plan computes, padding included."""
    if not len(lengths):
        return 0
    widths = lengths.astype(np.int64) + rule.extra_tokens
    if not rule.padded:
        return int(widths.sum())
    return int((np.diff(starts, append=len(lengths)) * widths[starts]).sum())


def padding_overhead(lengths: np.ndarray, starts: np.ndarray) -> float:
    """Padded tokens / real tokens - 1 of batches padded to their longest; 0 for an empty table."""
    real = int(lengths.sum())
    if not real:
        return 0.0
    return positions(lengths, starts, PlanRule(padded=True, token_budget=1)) / real - 1


def plan_buckets(starts: np.ndarray, rows: int, max_buckets: int) -> np.ndarray:
    """Bucket of every batch, int64 ``(batches,)``, ascending from 0, with near-equal rows of work a bucket.

    As many as a bucket has batches, and at most ``max_buckets``: a lost bucket costs a small share of the table, and
    the orchestrator's work for each stays small beside the passes in it.
    """
    batches = len(starts)
    if not batches:
        return np.zeros(0, dtype=np.int64)
    buckets = min(max_buckets, math.ceil(math.sqrt(batches)))
    return np.arange(batches) * buckets // batches
