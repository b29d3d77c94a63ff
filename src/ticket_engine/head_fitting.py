"""Fit a head on labelled tickets: depth, blend, strength, temperature and thresholds, all on held-out rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from ticket_engine.calibration import (
    PROMISE_CONFIDENCE,
    exit_threshold,
    expected_calibration_error,
    fit_temperature,
    log_softmax,
)
from ticket_engine.errors import HeadError, SettingsError
from ticket_engine.fitted_texts import hash_texts
from ticket_engine.head_designs import (
    FEW_ROWS,
    NEVER,
    FittingRows,
    blocks_of_depth,
    candidate_depths,
    fit_stage,
    make_design,
    raw_scores,
    without_texts,
)
from ticket_engine.heads import Block, Head, HeadIdentity, Stage
from ticket_engine.learnability import CHANCE, chance_of_random_labels, unlearnable_words

FOLDS = 5
MOST_HELD_OUT = 2000  # rows that are held out in turn; with more labels the rest only trains
MOST_ROWS = 5000
FEWEST_ROWS = 10  # below, nothing can be measured: no temperature, no thresholds
PROVING_SHARE = 3  # one held-out row in three chooses nothing: a promised precision rests on these alone
FEWEST_PROVING = 90  # held-out rows below which none is set apart: 30 could promise next to nothing
DEPTH_ROWS = 133  # choosing rows (of 200) below which depths cannot be told apart (100 rows: auto 0.709, deepest 0.728)
UNMEASURED_TEMPERATURE = 10.0  # best without labels on seven sets: 6 to 19, mean 11
LEAST_LEAVING = 0.05


@dataclass(frozen=True, slots=True)
class FitRule:
    """How a head is chosen.

    Attributes:
        depth: ``auto`` (the cheapest depth that the best does not beat by one standard error),
            ``best`` (the least held-out log loss) or a number of layers.
        layers: Of the model.
        allowed_loss: Accuracy that leaving early may cost against the last stage, all in all.
        unproven: Fit even where the labels cannot be told from random ones.
        seed: Of folds and permutations.
    """

    layers: int
    depth: str | int = "auto"
    allowed_loss: float = 0.005
    unproven: bool = False
    seed: int = 0

    @property
    def depths(self) -> tuple[int, ...]:
        """Depths whose hidden states the pass must collect."""
        if isinstance(self.depth, int):
            if not 0 <= self.depth <= self.layers:
                raise SettingsError(f"The depth is {self.depth}. Allowed: auto, best, or 0 to {self.layers} layers.")
            return tuple(sorted({d for d in candidate_depths(self.layers) if d < self.depth} | ({self.depth} - {0})))
        return candidate_depths(self.layers)

    def blocks(self, depth: int) -> tuple[Block, ...]:
        """What a stage of this depth reads."""
        return blocks_of_depth(depth, self.depths, self.layers)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Answers of every depth on tickets that its fit did not see.

    Attributes:
        rows: Which tickets, int64.
        log_probs: Calibrated, float64 ``(rows, labels)`` a depth.
        temperatures: One a depth.
        truth: int64 ``(rows,)``.
        proving: Rows that chose nothing, no temperature, depth or threshold, bool ``(rows,)``.
    """

    rows: np.ndarray
    log_probs: Mapping[int, np.ndarray]
    temperatures: Mapping[int, float]
    truth: np.ndarray
    proving: np.ndarray

    def part(self, picked: np.ndarray) -> "HeldOut":
        """Some of the rows."""
        log_probs = {depth: values[picked] for depth, values in self.log_probs.items()}
        return HeldOut(self.rows[picked], log_probs, self.temperatures, self.truth[picked], self.proving[picked])

    def loss(self, depth: int) -> np.ndarray:
        """Minus the log-probability of the true label, ``(rows,)``."""
        return -self.log_probs[depth][np.arange(len(self.truth)), self.truth]

    def correct(self, depth: int) -> np.ndarray:
        """Whether the likeliest label is the true one, bool ``(rows,)``."""
        return self.log_probs[depth].argmax(1) == self.truth

    def confidence(self, depth: int) -> np.ndarray:
        """Highest label probability, ``(rows,)``."""
        return np.exp(self.log_probs[depth].max(1))


@threadpool_limits.wrap(limits=1)
def fit_head(
    tickets: FittingRows, label_rows: FittingRows, labels: Sequence[str], *, rule: FitRule, identity: HeadIdentity
) -> Head:
    """A head for these tickets.

    Linear algebra runs on one thread: matrices are small, and two threads that wait for each other on a
    busy machine took 34 s of processor time for what one does in 3 s (500 tickets, 8 labels).

    Args:
        tickets: With hidden states at ``rule.depths``; rows labelled -1 only help the scaling.
        label_rows: One or more rows for every label: descriptions, examples.
        labels: Class ids in order.
        rule: How to choose.
        identity: What the head will belong to.

    Raises:
        HeadError: The labels cannot be told from random ones, or too few rows to fit anything.
    """
    wanted = rule.blocks(max(rule.depths, default=0))
    tickets, label_rows = tickets.keep(wanted), label_rows.keep(wanted)
    labelled, background = _split(tickets, rule)
    enough = len(labelled.texts) >= FEWEST_ROWS
    if len(labelled.texts) + len(background.texts) < 2:
        raise HeadError("Fitting needs at least 2 tickets, better 20 or more, labelled or not. None were given.")
    design = make_design(labelled, label_rows, len(labels), background)
    apart = make_design(labelled, without_texts(label_rows, labelled.texts), len(labels), background)
    held_out = hold_out(labelled, label_rows, background, labels=len(labels), rule=rule) if enough else None
    choosing = held_out.part(~held_out.proving) if held_out else None
    last = choose_depth(choosing, rule)
    chance = chance_of_random_labels(apart, rule.blocks(last), rule.seed) if enough else None
    if chance is not None and chance > CHANCE and len(labelled.texts) >= FEW_ROWS and not rule.unproven:
        raise HeadError(unlearnable_words(labelled.label_indices, labels, float(held_out.correct(last).mean())))
    thresholds = choose_thresholds(choosing, last, rule)
    stages = []
    for depth, threshold in thresholds.items():
        stage, _ = fit_stage(design, depth, rule.blocks(depth), rule.seed)
        temperature = held_out.temperatures[depth] if held_out else UNMEASURED_TEMPERATURE
        stages.append(_finished(stage, temperature, threshold))
    proving = held_out.part(held_out.proving) if held_out and held_out.proving.any() else None
    confidence, correct, _ = staged_answers(proving, thresholds)
    _, _, leaving = staged_answers(held_out, thresholds)
    used = {block for stage in stages for block in stage.hidden_weights}
    return Head(
        labels=tuple(labels),
        identity=identity,
        lexicon=design.lexicon,
        scalings={block: design.scalings[block] for block in sorted(used)},
        stages=tuple(stages),
        held_out_confidence=confidence.astype(np.float32),
        held_out_correct=correct,
        fitted_texts=np.unique(hash_texts(labelled.texts)),
        report=_report(labelled, labels, held_out, chance=chance, leaving=leaving, rule=rule),
    )


def hold_out(
    tickets: FittingRows, label_rows: FittingRows, background: FittingRows, *, labels: int, rule: FitRule
) -> HeldOut:
    """Answers of every depth, each ticket left out of its fit in turn, blend and strength chosen without it."""
    rng = np.random.default_rng(rule.seed)
    rows = np.sort(rng.permutation(len(tickets.texts))[:MOST_HELD_OUT])
    fold_of = stratified_folds(tickets.label_indices[rows], min(FOLDS, len(rows)), rng)
    depths = (0, *rule.depths)
    scores = {depth: np.zeros((len(rows), labels)) for depth in depths}
    for fold in range(fold_of.max() + 1):
        inside = fold_of == fold
        kept = np.setdiff1d(np.arange(len(tickets.texts)), rows[inside])
        left = tickets.take(rows[inside])
        design = make_design(tickets.take(kept), without_texts(label_rows, left.texts), labels, background)
        for depth in depths:
            stage, _ = fit_stage(design, depth, rule.blocks(depth), rule.seed)
            scores[depth][inside] = raw_scores(stage, design, left)
    truth = tickets.label_indices[rows]
    proving = np.zeros(len(rows), dtype=bool)
    if len(rows) >= FEWEST_PROVING:
        proving[rng.permutation(len(rows))[: len(rows) // PROVING_SHARE]] = True
    temperatures = {depth: fit_temperature(values[~proving], truth[~proving]) for depth, values in scores.items()}
    log_probs = {depth: log_softmax(temperatures[depth] * values) for depth, values in scores.items()}
    return HeldOut(rows, log_probs, temperatures, truth, proving)


def choose_depth(held_out: HeldOut | None, rule: FitRule) -> int:
    """Depth of the last stage; the deepest where nothing could be measured."""
    if isinstance(rule.depth, int):
        return rule.depth
    if held_out is None or (rule.depth == "auto" and len(held_out.rows) < DEPTH_ROWS):
        return rule.layers
    losses = {depth: held_out.loss(depth) for depth in sorted(held_out.log_probs)}
    best = min(losses, key=lambda depth: losses[depth].mean())
    if rule.depth == "best":
        return best
    if rule.depth != "auto":
        raise SettingsError(f"The depth is {rule.depth!r}. Allowed: auto, best, or 0 to {rule.layers} layers.")
    for depth, loss in losses.items():
        behind = loss - losses[best]
        if behind.mean() <= behind.std(ddof=1) / np.sqrt(len(behind)):
            return depth
    return best


def choose_thresholds(held_out: HeldOut | None, last: int, rule: FitRule) -> dict[int, float]:
    """Depths of the stages, growing, with the confidence at which each decides; 0 at the last.

    Stage 0 is always there. One more stands before the last where it decides at least 5 % of the tickets.
    Both together may cost ``rule.allowed_loss`` of accuracy against sending every ticket to the last.
    """
    if last == 0:
        return {0: 0.0}
    if held_out is None:
        return {0: NEVER, last: 0.0}
    final = held_out.correct(last)
    thresholds: dict[int, float] = {}
    open_rows = np.ones(len(final), dtype=bool)
    between = [depth for depth in rule.depths if depth < last]
    middle = between[min(1, len(between) - 1)] if between else None
    for depth in (0, middle):
        if depth is None:
            continue
        confidence = held_out.confidence(depth)
        allowed = rule.allowed_loss / 2 * len(final) / max(int(open_rows.sum()), 1)
        threshold = exit_threshold(confidence[open_rows], held_out.correct(depth)[open_rows], final[open_rows], allowed)
        leaving = open_rows & (confidence >= (NEVER if threshold is None else threshold))
        if leaving.mean() >= LEAST_LEAVING:
            thresholds[depth] = float(threshold)
            open_rows &= ~leaving
        elif depth == 0:
            thresholds[depth] = NEVER
    return {**thresholds, last: 0.0}


def staged_answers(
    held_out: HeldOut | None, thresholds: Mapping[int, float]
) -> tuple[np.ndarray, np.ndarray, dict[int, float]]:
    """Confidence and correctness of the staged decision on held-out rows, and the share deciding at each depth."""
    if held_out is None:
        return np.zeros(0), np.zeros(0, dtype=bool), {}
    confidence, correct = np.zeros(len(held_out.truth)), np.zeros(len(held_out.truth), dtype=bool)
    open_rows = np.ones(len(correct), dtype=bool)
    leaving = {}
    for depth, threshold in thresholds.items():
        own = held_out.confidence(depth)
        here = open_rows & (own >= threshold)
        confidence[here], correct[here] = own[here], held_out.correct(depth)[here]
        leaving[depth] = float(here.mean())
        open_rows &= ~here
    return confidence, correct, leaving


def stratified_folds(label_indices: np.ndarray, folds: int, rng: np.random.Generator) -> np.ndarray:
    """Fold of each row, int64: every label spread over the folds as evenly as can be."""
    order = rng.permutation(len(label_indices))
    order = order[np.argsort(label_indices[order], kind="stable")]
    fold_of = np.empty(len(order), dtype=np.int64)
    fold_of[order] = np.arange(len(order)) % folds
    return fold_of


def _split(tickets: FittingRows, rule: FitRule) -> tuple[FittingRows, FittingRows]:
    has_label = tickets.label_indices >= 0
    rows = np.flatnonzero(has_label)
    if len(rows) > MOST_ROWS:
        rows = np.sort(np.random.default_rng(rule.seed).choice(rows, MOST_ROWS, replace=False))
    return tickets.take(rows), tickets.take(np.flatnonzero(~has_label))


def _finished(stage: Stage, temperature: float, threshold: float) -> Stage:
    return Stage(
        stage.depth, stage.lexical_weights, stage.hidden_weights, stage.bias, float(temperature), float(threshold)
    )


def _report(tickets, labels, held_out: HeldOut | None, *, chance, leaving, rule: FitRule) -> dict[str, object]:
    counts = np.bincount(tickets.label_indices, minlength=len(labels)) if len(tickets.texts) else np.zeros(len(labels))
    made: dict[str, object] = {
        "labelled_tickets": len(tickets.texts),
        "label_counts": {label: int(count) for label, count in zip(labels, counts, strict=True)},
        "labels_without_tickets": [label for label, count in zip(labels, counts, strict=True) if count == 0],
        "layers": rule.layers,
        "depth_rule": rule.depth,
        "chance_of_random_labels": chance,
        "fewest_to_judge": FEW_ROWS,
        "promise": {
            "held_out_tickets": int(held_out.proving.sum()) if held_out else 0,
            "confidence": PROMISE_CONFIDENCE,
        },
    }
    if held_out is None:
        return made
    made["held_out"] = {
        str(depth): {
            "accuracy": float(held_out.correct(depth).mean()),
            "log_loss": float(held_out.loss(depth).mean()),
            "calibration_error": expected_calibration_error(held_out.confidence(depth), held_out.correct(depth)),
        }
        for depth in held_out.log_probs
    }
    made["share_deciding"] = {str(depth): share for depth, share in leaving.items()}
    open_share, cost = 1.0, 0.0
    reached = 0
    for depth, share in leaving.items():
        cost += open_share * (depth - reached) / rule.layers
        reached, open_share = depth, open_share - share
    made["share_of_full_depth"] = cost
    return made
