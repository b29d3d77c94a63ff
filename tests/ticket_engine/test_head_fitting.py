"""Fitting: what is learnt from many, few, no and random labels, and how depths and thresholds are chosen."""

import numpy as np
import pytest

from tasks.fit import report_lines
from tests.toy_rows import IDENTITY, LABELS, LAYERS, make_label_rows, make_rows
from ticket_engine.errors import HeadError, SettingsError
from ticket_engine.fitted_texts import hash_texts
from ticket_engine.head_designs import NEVER, FittingRows, blocks_of_depth, candidate_depths
from ticket_engine.head_fitting import (
    FitRule,
    HeldOut,
    choose_depth,
    choose_thresholds,
    fit_head,
    hold_out,
    stratified_folds,
)
from ticket_engine.heads import Block, apply_head, decide_by_text
from ticket_engine.lexical import lexical_features


def fit(rows: FittingRows, **rule: object):
    return fit_head(rows, make_label_rows(), LABELS, rule=FitRule(layers=LAYERS, **rule), identity=IDENTITY)


def with_labels(rows: FittingRows, label_indices: np.ndarray) -> FittingRows:
    return FittingRows(rows.texts, label_indices, rows.hidden)


def accuracy(head, rows: FittingRows) -> float:
    log_probs, _ = apply_head(head, lexical_features(rows.texts, head.lexicon), rows.hidden)
    return float((log_probs.argmax(1) == rows.label_indices).mean())


def test_random_labels_are_refused_in_plain_words() -> None:
    rows = make_rows(120, 0)
    shuffled = np.random.default_rng(1).permutation(rows.label_indices)
    with pytest.raises(HeadError, match="Nothing can be learnt from these 120 labels") as caught:
        fit(with_labels(rows, shuffled))
    assert caught.value.exit_code == 2


def test_random_labels_can_be_fitted_on_demand_and_say_so() -> None:
    rows = make_rows(120, 0)
    head = fit(with_labels(rows, np.random.default_rng(1).permutation(rows.label_indices)), unproven=True)
    assert head.report["chance_of_random_labels"] > 0.01


def test_true_labels_are_told_from_random_ones() -> None:
    assert fit(make_rows(120, 0)).report["chance_of_random_labels"] <= 0.01


def test_without_any_label_the_descriptions_decide() -> None:
    rows = make_rows(60, 0, clear=1.0)
    head = fit(with_labels(rows, np.full(60, -1)))
    assert accuracy(head, make_rows(200, 1, clear=1.0)) > 0.6
    assert head.report["labels_without_tickets"] == list(LABELS)
    assert head.report["chance_of_random_labels"] is None
    assert len(head.held_out_confidence) == 0


def test_a_label_without_tickets_can_still_be_given_and_is_reported() -> None:
    rows = make_rows(200, 0, clear=1.0)
    head = fit(with_labels(rows, np.where(rows.label_indices == 2, -1, rows.label_indices)))
    assert head.report["labels_without_tickets"] == ["account"]
    test = make_rows(200, 1, clear=1.0)
    log_probs, _ = apply_head(head, lexical_features(test.texts, head.lexicon), test.hidden)
    assert (log_probs.argmax(1) == 2).any()


def test_more_labels_make_a_better_head() -> None:
    test = make_rows(400, 9)
    assert accuracy(fit(make_rows(400, 0), depth=LAYERS), test) > accuracy(fit(make_rows(15, 0), depth=LAYERS), test)


def test_held_out_confidence_is_calibrated_on_new_tickets() -> None:
    head, rows = fit(make_rows(400, 0), depth=LAYERS), make_rows(1000, 1)
    log_probs, _ = apply_head(head, lexical_features(rows.texts, head.lexicon), rows.hidden)
    right = log_probs.argmax(1) == rows.label_indices
    assert abs(np.exp(log_probs.max(1)).mean() - right.mean()) < 0.05


def test_early_stages_cost_no_more_than_allowed_on_new_tickets() -> None:
    rows, test = make_rows(500, 0), make_rows(1500, 1)
    staged = fit(rows, depth=LAYERS, allowed_loss=0.005)
    always = fit(rows, depth=LAYERS, allowed_loss=0.0)
    assert staged.report["share_of_full_depth"] < 0.9
    assert accuracy(always, test) - accuracy(staged, test) < 0.02


@pytest.mark.parametrize("depth", [-1, 11])
def test_a_depth_that_the_model_does_not_have_is_a_settings_error(depth: int) -> None:
    with pytest.raises(SettingsError, match="0 to 10 layers"):
        fit(make_rows(60, 0), depth=depth)


def test_depth_zero_needs_no_hidden_states() -> None:
    rows = make_rows(100, 0)
    bare = FittingRows(rows.texts, rows.label_indices, {})
    labels = FittingRows(make_label_rows().texts, np.arange(3), {})
    head = fit_head(bare, labels, LABELS, rule=FitRule(layers=LAYERS, depth=0), identity=IDENTITY)
    assert head.depths == ()
    assert head.stages[0].threshold == 0


def test_a_depth_by_number_is_the_last_stage() -> None:
    assert fit(make_rows(100, 0), depth=4).stages[-1].depth == 4


def test_one_ticket_is_too_few() -> None:
    with pytest.raises(HeadError, match="at least 2 tickets"):
        fit(make_rows(1, 0))


def held_out(losses: dict[int, np.ndarray]) -> HeldOut:
    """Two labels, the first always true, with these log losses."""
    log_probs = {depth: np.stack([-loss, np.log(-np.expm1(-loss))], 1) for depth, loss in losses.items()}
    count = len(next(iter(losses.values())))
    nothing = np.zeros(count, dtype=int)
    return HeldOut(np.arange(count), log_probs, dict.fromkeys(losses, 1.0), nothing, nothing.astype(bool))


def test_auto_takes_the_cheapest_depth_within_one_standard_error_of_the_best() -> None:
    rng = np.random.default_rng(0)
    base = rng.uniform(0.2, 0.9, 400)
    noise = rng.normal(0, 0.2, 400) - rng.normal(0, 0.2, 400).mean()
    noise -= noise.mean()
    close = held_out({0: base + 0.1, 4: np.abs(base + noise) + 0.001, 10: base})
    assert choose_depth(close, FitRule(layers=LAYERS)) == 4
    assert choose_depth(close, FitRule(layers=LAYERS, depth="best")) in (4, 10)
    far = held_out({0: base + 0.1, 4: base + 0.05, 10: base})
    assert choose_depth(far, FitRule(layers=LAYERS)) == 10


def test_auto_takes_the_deepest_where_rows_are_too_few_to_tell() -> None:
    assert choose_depth(held_out({0: np.full(50, 0.2), 10: np.full(50, 0.3)}), FitRule(layers=LAYERS)) == 10
    assert choose_depth(None, FitRule(layers=LAYERS)) == 10


def test_a_stage_that_decides_hardly_any_ticket_is_left_out() -> None:
    loss = np.full(400, 2.0)
    loss[:8] = 0.01
    thresholds = choose_thresholds(
        held_out({0: loss, 1: loss, 2: loss, 10: np.full(400, 0.1)}), 10, FitRule(layers=LAYERS)
    )
    assert thresholds == {0: NEVER, 10: 0.0}


def test_both_early_stages_together_cost_no_more_than_what_is_allowed() -> None:
    """Each stage gets half: stage 0 may lose 1 % of 1,000 tickets, not 2 %."""
    rows = 1000
    truth, last = np.zeros(rows, dtype=int), np.tile(np.log([0.98, 0.02]), (rows, 1))
    sure = np.linspace(0.99, 0.6, rows)
    text = np.log(np.stack([sure, 1 - sure], 1))
    wrong = np.arange(40, rows, 20)  # every twentieth is lost by the text alone
    text[wrong] = text[wrong][:, ::-1]
    made = HeldOut(
        np.arange(rows), {0: text, 2: last, 10: last}, {0: 1.0, 2: 1.0, 10: 1.0}, truth, np.zeros(rows, dtype=bool)
    )
    thresholds = choose_thresholds(made, 10, FitRule(layers=LAYERS, allowed_loss=0.02))
    decided = sure >= thresholds[0]
    lost = int((text[decided].argmax(1) != 0).sum())
    assert lost + np.sqrt(lost + 0.25) <= 0.01 * rows < lost + 1 + np.sqrt(lost + 1.25)


def test_rows_that_prove_a_promise_choose_nothing() -> None:
    rows, labels = make_rows(240, 0), make_label_rows()
    rule = FitRule(layers=LAYERS, depth=LAYERS)
    first = hold_out(rows, labels, rows.take(np.zeros(0, dtype=int)), labels=3, rule=rule)
    assert first.proving.sum() == 80
    assert len(fit(rows).held_out_correct) == 80
    turned = rows.label_indices.copy()
    turned[first.rows[first.proving]] = (turned[first.rows[first.proving]] + 1) % 3
    other = HeldOut(first.rows, first.log_probs, first.temperatures, turned[first.rows], first.proving)
    kept = ~first.proving
    assert choose_thresholds(first.part(kept), LAYERS, rule) == choose_thresholds(other.part(kept), LAYERS, rule)
    few = fit(make_rows(60, 0))
    assert len(few.held_out_correct) == 0
    assert few.report["promise"]["held_out_tickets"] == 0


def test_examples_that_are_tickets_do_not_answer_for_them() -> None:
    """Examples of the labels file were rows of every fold: random labels passed, held-out accuracy 0.67."""
    rows = make_rows(120, 0)
    shuffled = np.random.default_rng(1).permutation(rows.label_indices)
    described = make_label_rows()
    picked = np.arange(0, 120, 2)
    hidden = {block: np.concatenate([values, rows.hidden[block][picked]]) for block, values in described.hidden.items()}
    texts = [*described.texts, *(f" {rows.texts[row].upper()} " for row in picked)]
    examples = FittingRows(texts, np.concatenate([described.label_indices, shuffled[picked]]), hidden)
    with pytest.raises(HeadError, match="Nothing can be learnt"):
        fit_head(with_labels(rows, shuffled), examples, LABELS, rule=FitRule(layers=LAYERS), identity=IDENTITY)


def test_a_head_knows_the_texts_that_it_was_fitted_on_and_keeps_none() -> None:
    rows = make_rows(60, 0)
    head = fit(rows)
    assert np.isin(hash_texts([f"  {text.upper()}\n" for text in rows.texts]), head.fitted_texts).all()
    assert not np.isin(hash_texts(["something else"]), head.fitted_texts).any()


@pytest.mark.parametrize("tickets", [15, 30, 45])
def test_below_fifty_rows_random_labels_are_fitted_and_the_report_says_that_nothing_was_proven(tickets: int) -> None:
    rows = make_rows(tickets, 0)
    head = fit(with_labels(rows, np.random.default_rng(1).permutation(rows.label_indices)))
    report = {**head.report, "stages": [{"depth": stage.depth} for stage in head.stages], "seconds": {}}
    assert "unproven   whether anything can be learnt cannot be judged below 50 labelled tickets" in report_lines(
        report
    )


@pytest.mark.parametrize("tickets", [15, 30, 45])
def test_a_head_of_few_separable_rows_is_not_sure_of_tickets_that_say_nothing(tickets: int) -> None:
    rows = make_rows(tickets, 0, clear=1.0)
    bare = FittingRows(rows.texts, rows.label_indices, {})
    described = FittingRows(make_label_rows().texts, np.arange(3), {})
    head = fit_head(bare, described, LABELS, rule=FitRule(layers=LAYERS, depth=0), identity=IDENTITY)
    nothing, clear = make_rows(500, 7, clear=0.0), make_rows(500, 8, clear=1.0)
    confidence = [np.exp(decide_by_text(head, test.texts)[0].max(1)).mean() for test in (nothing, clear)]
    assert confidence[0] < 0.5  # one in three is right
    assert 0.85 < confidence[1] <= (tickets + 1) / (tickets + 2) + 0.01


def test_folds_spread_every_label() -> None:
    indices = np.repeat([0, 1, 2], [50, 10, 5])
    fold_of = stratified_folds(indices, 5, np.random.default_rng(0))
    for label, count in ((0, 10), (1, 2), (2, 1)):
        assert [int((indices[fold_of == fold] == label).sum()) for fold in range(5)] == [count] * 5


def test_depths_and_blocks_of_a_thirty_layer_model() -> None:
    depths = candidate_depths(30)
    assert depths == (3, 6, 12, 24, 30)
    assert blocks_of_depth(6, depths, 30) == (Block(3, "mean"), Block(6, "mean"))
    assert blocks_of_depth(30, depths, 30)[-1] == Block(30, "last")
    assert blocks_of_depth(0, depths, 30) == ()
