"""The staged pass: equal to features of every ticket alone, whoever leaves beside it."""

from dataclasses import replace

import numpy as np
import pytest

from ticket_engine.errors import HeadError, ModelError
from ticket_engine.fitting_features import hidden_of
from ticket_engine.head_designs import NEVER, FittingRows
from ticket_engine.head_fitting import FitRule, fit_head
from ticket_engine.head_scoring import HeadScorer
from ticket_engine.heads import Block, Head, HeadIdentity, apply_head
from ticket_engine.lexical import lexical_features
from ticket_engine.staged_pass import staged_model

LABELS = ("billing", "delivery", "returns", "account")


def make_tickets(count: int, seed: int) -> tuple[list[np.ndarray], list[str]]:
    """Token ids, longest first, with texts that go with them."""
    rng = np.random.default_rng(seed)
    lengths = np.sort(rng.integers(1, 90, count))[::-1]
    lengths[1] = lengths[0]
    ids = [rng.integers(5, 500, length).astype(np.int64) for length in lengths]
    return ids, [" ".join(f"w{token}" for token in row[:12]) for row in ids]


def make_head(engine, thresholds: tuple[float, float]) -> Head:
    """Stages at 0, 2 and 3 layers, fitted to labels that a token decides."""
    ids, texts = make_tickets(60, 0)
    truth = np.array([int(row[0]) % 4 for row in ids])
    hidden = hidden_of(engine, ids, (1, 2, 3))
    label_rows = FittingRows(list(LABELS), np.arange(4), {block: values[:4] for block, values in hidden.items()})
    rule = FitRule(layers=3, depth=3, unproven=True)
    identity = HeadIdentity("", "", "", "")
    rows = FittingRows(texts, truth, hidden)
    head = fit_head(rows, label_rows, LABELS, rule=rule, identity=identity)
    middle = fit_head(rows, label_rows, LABELS, rule=replace(rule, depth=2), identity=identity)
    first, second = thresholds
    stages = (
        replace(head.stages[0], threshold=first),
        replace(middle.stages[-1], threshold=second),
        head.stages[-1],
    )
    return replace(head, stages=stages, scalings={**middle.scalings, **head.scalings})


def with_threshold(head: Head, threshold: float) -> Head:
    return replace(head, stages=(head.stages[0], replace(head.stages[1], threshold=threshold), head.stages[2]))


def run(engine, head: Head, ids: list[np.ndarray], texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities, and which stage of the head decided."""
    log_probs, depths = HeadScorer(engine, head).score(ids, texts)
    place = {stage.depth: index for index, stage in enumerate(head.stages)}
    return log_probs, np.array([place[depth] for depth in depths])


@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3", "gemma3", "phi", "gpt_neox", "granite", "opt"])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_leaving_early_gives_what_the_head_gives_on_features_of_each_ticket_alone(make_engine, model, prefix_cache):
    engine = make_engine(model, execution="packed", prefix_cache=prefix_cache)
    head = make_head(engine, (NEVER, 0.0))
    ids, texts = make_tickets(25, 1)
    sure = np.sort(np.exp(run(engine, head, ids, texts)[0].max(1)))
    head = with_threshold(head, float(sure[12] + sure[13]) / 2)
    log_probs, stage_of = run(engine, head, ids, texts)
    assert set(stage_of) == {1, 2}  # both stages decide some
    for row, (one, text) in enumerate(zip(ids, texts, strict=True)):
        hidden = hidden_of(engine, [one], (1, 2, 3))
        slow, stage = apply_head(head, lexical_features([text], head.lexicon), hidden)
        np.testing.assert_allclose(log_probs[row], slow[0], atol=1e-3)
        assert stage_of[row] == stage[0]


@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3", "gemma3", "phi", "gpt_neox", "granite", "opt"])
def test_the_reference_gives_the_same_from_whole_prompts_of_the_stock_model(make_engine, model):
    engine = make_engine(model, execution="packed")
    head = make_head(engine, (NEVER, 0.3))
    ids, texts = make_tickets(12, 3)
    scorer = HeadScorer(engine, head)
    log_probs, stage_of = scorer.score(ids, texts)
    for row, (one, text) in enumerate(zip(ids, texts, strict=True)):
        slow, stage = scorer.reference(one, text)
        np.testing.assert_allclose(log_probs[row], slow, atol=1e-3)
        assert stage_of[row] == stage


def test_the_reference_lets_the_text_alone_decide_where_it_is_sure(make_engine) -> None:
    engine = make_engine("llama", execution="packed")
    head = make_head(engine, (0.0, 0.3))
    ids, texts = make_tickets(3, 4)
    assert HeadScorer(engine, head).reference(ids[0], texts[0])[1] == 0


def test_other_executions_than_packed_are_refused(make_engine) -> None:
    head = make_head(make_engine("llama", execution="packed"), (NEVER, 0.3))
    with pytest.raises(ModelError, match="needs execution packed"):
        HeadScorer(make_engine("llama", execution="padded"), head)


@pytest.mark.parametrize("threshold", [0.0, NEVER])
def test_all_may_leave_at_once_or_none_early(make_engine, threshold: float) -> None:
    engine = make_engine("llama", execution="packed")
    ids, texts = make_tickets(12, 2)
    log_probs, stage_of = run(engine, make_head(engine, (NEVER, threshold)), ids, texts)
    assert set(stage_of) == ({1} if threshold == 0 else {2})
    np.testing.assert_allclose(np.exp(log_probs).sum(1), 1, atol=1e-5)


def test_layers_below_the_last_stage_are_all_that_run(make_engine) -> None:
    engine = make_engine("llama", execution="packed")
    head = make_head(engine, (NEVER, 0.0))
    shallow = replace(head, stages=head.stages[:2])
    assert staged_model(engine.view, shallow).depths == (1, 2)


def test_a_head_of_a_deeper_model_is_refused(make_engine) -> None:
    engine = make_engine("llama", execution="packed")
    head = make_head(engine, (NEVER, 0.3))
    deep = replace(head.stages[-1], depth=9, hidden_weights={Block(9, "mean"): np.zeros((32, 4), np.float32)})
    with pytest.raises(HeadError, match="reads layer 9, the model has 3"):
        staged_model(engine.view, replace(head, stages=(*head.stages[:2], deep)))


def test_the_reference_takes_the_runs_stage_only_where_its_own_confidence_is_within_rounding_of_the_threshold(
    make_engine,
) -> None:
    """A tolerance 100 times as wide once took any stage that the run named."""
    engine = make_engine("llama", execution="packed")
    head = make_head(engine, (NEVER, 0.0))
    ids, texts = make_tickets(3, 6)
    sure = float(np.exp(HeadScorer(engine, head).reference(ids[0], texts[0])[0].max()))
    for distance, expected in ((0.3e-4, 3), (3e-3, 2)):  # the tolerance is 1e-4
        scorer = HeadScorer(engine, with_threshold(head, sure * (1 - distance)))
        assert scorer.reference(ids[0], texts[0], depth=3)[1] == expected


def test_a_threshold_that_words_alone_reach_has_no_tolerance_of_16_bits(make_engine) -> None:
    engine = make_engine("llama", execution="packed")
    head = make_head(engine, (0.0, 0.3))
    ids, texts = make_tickets(3, 6)
    scorer = HeadScorer(engine, head)
    sure = float(np.exp(scorer.reference(ids[0], texts[0], 0)[0].max()))
    strict = replace(head, stages=(replace(head.stages[0], threshold=sure * 1.05), *head.stages[1:]))
    loose = HeadScorer(engine, strict, tolerance=0.25)
    assert loose.reference(ids[0], texts[0], depth=0)[1] > 0
