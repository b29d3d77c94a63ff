from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from ticket_engine.errors import ScoringError
from ticket_engine.label_trie import build_trie
from ticket_engine.models import load_weights
from ticket_engine.reference import reference_scores

LABEL_SETS = {
    "one token each": ((308,), (360,), (468,), (354,)),
    "one begins another": ((30, 2), (30, 41, 2), (30, 41, 52, 2), (77, 2)),
    "shared first tokens": ((30, 41), (30, 52), (30, 63, 41), (30, 63, 52), (77,)),
    "one label": ((30, 41),),
}


@pytest.mark.parametrize("label_ids", LABEL_SETS.values(), ids=LABEL_SETS)
@pytest.mark.parametrize("length", [1, 5, 90])
def test_the_reference_equals_naive_scoring_of_every_label_by_a_whole_pass(
    each_loaded: PreTrainedModel,
    naive_scores: Callable[..., np.ndarray],
    label_ids: tuple[tuple[int, ...], ...],
    length: int,
) -> None:
    model = each_loaded
    prompt = np.random.default_rng(length).integers(3, 500, length).tolist()
    made = reference_scores(model, prompt, build_trie(label_ids))
    assert made.dtype == torch.float32
    assert made.shape == (len(label_ids),)
    np.testing.assert_allclose(made.numpy(), naive_scores(model, prompt, label_ids), atol=1e-4)
    assert float(made.exp().sum()) == pytest.approx(1, abs=1e-6)


def test_the_reference_is_right_where_a_sliding_window_is_shorter_than_the_prompt(
    tiny_model: Callable[[str], Path], naive_scores: Callable[..., np.ndarray]
) -> None:
    model = load_weights(tiny_model("gemma3_short_window"), "float32")
    assert model.config.sliding_window == 64
    prompt = np.random.default_rng(0).integers(3, 500, 150).tolist()
    label_ids = LABEL_SETS["one begins another"]
    made = reference_scores(model, prompt, build_trie(label_ids)).numpy()
    np.testing.assert_allclose(made, naive_scores(model, prompt, label_ids), atol=1e-4)
    without_window = load_weights(tiny_model("gemma3"), "float32")
    assert np.abs(made - naive_scores(without_window, prompt, label_ids)).max() > 0.01


def test_scores_that_are_not_finite_are_an_error(tiny_model: Callable[[str], Path]) -> None:
    model = load_weights(tiny_model("llama"), "float32")
    model.model.norm.weight[3] = float("nan")
    with pytest.raises(ScoringError, match="1 of 1 tickets"):
        reference_scores(model, [5, 6, 7], build_trie(((308,), (360,))))
