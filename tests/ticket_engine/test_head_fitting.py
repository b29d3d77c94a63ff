"""Fitting: what is learnt from many, few, no and random labels, and how depths and thresholds are chosen."""

import numpy as np
import pytest

from tests.toy_rows import IDENTITY, LABELS, LAYERS, make_label_rows, make_rows
from ticket_engine.errors import HeadError, SettingsError
from ticket_engine.head_designs import NEVER, FittingRows, blocks_of_depth, candidate_depths
from ticket_engine.head_fitting import FitRule, HeldOut, choose_depth, choose_thresholds, fit_head, stratified_folds
from ticket_engine.heads import Block, apply_head
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
    return HeldOut(np.arange(count), log_probs, dict.fromkeys(losses, 1.0), np.zeros(count, dtype=int))


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
