from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedModel

from ticket_engine.engine import Engine, packed_view
from ticket_engine.errors import ScoringError
from ticket_engine.label_trie import build_trie
from ticket_engine.models import load_weights
from ticket_engine.scoring import (
    Batch,
    PrefixCache,
    compute_prefix,
    label_scores,
    pack,
    packed_hidden,
    padded_hidden,
)

SINGLE = build_trie(((308,), (360,), (468,), (354,)))
BRANCHES = build_trie(((30, 2), (30, 41, 2), (30, 52, 2), (77, 2)))
NO_PREFIX = PrefixCache((), (), 0)


def random_batch(lengths: list[int], seed: int = 0) -> Batch:
    rows = np.array(lengths, dtype=np.int64)
    return Batch(np.random.default_rng(seed).integers(3, 500, rows.sum()), rows)


def tickets_of(batch: Batch) -> list[list[int]]:
    return [part.tolist() for part in np.split(batch.token_ids, np.cumsum(batch.lengths)[:-1])]


def test_a_packed_row_holds_every_ticket_and_its_label_nodes_with_positions_that_go_on_from_the_prefix() -> None:
    prefix = PrefixCache((torch.zeros(1, 1, 10, 4),), (torch.zeros(1, 1, 10, 4),), 10)
    ids, positions, layout = pack(Batch(np.array([5, 6, 7, 8, 9]), np.array([3, 2])), prefix, BRANCHES)
    # nodes: [30] [30 41] [30 52] [77], at depths 1, 2, 2, 1 behind the ticket's last token
    assert ids.tolist() == [[5, 6, 7, 30, 41, 52, 77, 8, 9, 30, 41, 52, 77]]
    assert positions.tolist() == [[10, 11, 12, 13, 14, 14, 13, 10, 11, 12, 13, 13, 12]]
    assert [(group.start, group.tickets, group.length) for group in layout.groups] == [(0, 1, 7), (7, 1, 6)]


def test_equal_lengths_next_to_each_other_are_one_group() -> None:
    _, _, layout = pack(random_batch([7, 7, 7, 2, 2, 1]), NO_PREFIX, SINGLE)
    assert [(group.start, group.tickets, group.length) for group in layout.groups] == [
        (0, 3, 7),
        (21, 2, 2),
        (25, 1, 1),
    ]


@pytest.mark.parametrize("with_prefix", [True, False])
def test_hidden_states_of_packed_and_padded_passes_equal_those_of_each_ticket_alone(
    each_loaded: PreTrainedModel, with_prefix: bool
) -> None:
    model = each_loaded
    prefix_ids = tuple(np.random.default_rng(1).integers(3, 500, 30).tolist()) if with_prefix else ()
    batch = random_batch([60, 33, 33, 4, 1])
    with torch.inference_mode():
        prefix = compute_prefix(model, prefix_ids)
        packed, nodes = packed_hidden(packed_view(model), batch, prefix, SINGLE)
        padded, _ = padded_hidden(model, batch, prefix, SINGLE)
        alone = torch.cat(
            [
                model.model(torch.tensor([[*prefix_ids, *ids]]), use_cache=False).last_hidden_state[:, -1]
                for ids in tickets_of(batch)
            ]
        )
    assert nodes.shape == (5, 0, model.config.hidden_size)
    torch.testing.assert_close(packed, alone, atol=1e-4, rtol=0)
    torch.testing.assert_close(padded, alone, atol=1e-4, rtol=0)


def test_hidden_states_at_label_nodes_equal_those_after_the_ticket_and_the_labels_beginning(
    each_loaded: PreTrainedModel,
) -> None:
    model = each_loaded
    batch = random_batch([20, 9, 9])
    with torch.inference_mode():
        prefix = compute_prefix(model, (7, 8, 9))
        _, packed = packed_hidden(packed_view(model), batch, prefix, BRANCHES)
        _, padded = padded_hidden(model, batch, prefix, BRANCHES)
        for row, ids in enumerate(tickets_of(batch)):
            for node, beginning in enumerate(([30], [30, 41], [30, 52], [77])):
                whole = torch.tensor([[7, 8, 9, *ids, *beginning]])
                alone = model.model(whole, use_cache=False).last_hidden_state[0, -1]
                torch.testing.assert_close(packed[row, node], alone, atol=1e-4, rtol=0)
                torch.testing.assert_close(padded[row, node], alone, atol=1e-4, rtol=0)


@given(seed=st.integers(0, 10_000), labels=st.lists(st.integers(0, 639), min_size=2, max_size=9, unique=True))
@settings(deadline=None, max_examples=20)
def test_scores_from_the_label_rows_equal_those_from_the_whole_vocabulary(
    each_loaded: PreTrainedModel, seed: int, labels: list[int]
) -> None:
    model = each_loaded
    last = torch.randn(6, model.config.hidden_size, generator=torch.Generator().manual_seed(seed))
    made = label_scores(model, last, torch.zeros(6, 0, 32), build_trie(tuple((token,) for token in labels)))
    # The models' own logits, soft cap included, come from their forward; a stand-in decoder gives it our states.
    whole = torch.log_softmax(_own_logits(model, last).double(), -1)[:, labels]
    expected = whole - torch.logsumexp(whole, -1, keepdim=True)
    torch.testing.assert_close(made.double(), expected, atol=1e-5, rtol=0)


def _own_logits(model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Logits as the model's own forward makes them of given last hidden states."""
    handle = model.model.norm.register_forward_hook(lambda *_: hidden[None])
    try:
        return model(input_ids=torch.full((1, len(hidden)), 5), use_cache=False).logits[0]
    finally:
        handle.remove()


def test_a_bias_of_the_output_matrix_counts(tiny_model: Callable[[str], Path]) -> None:
    model = load_weights(tiny_model("qwen3"), "float32")
    model.lm_head.bias = nn.Parameter(torch.randn(model.config.vocab_size), requires_grad=False)
    last, nodes = torch.randn(3, 32), torch.randn(3, 4, 32)
    made = label_scores(model, last, torch.zeros(3, 0, 32), SINGLE)
    expected = torch.log_softmax(model.lm_head(last)[:, [308, 360, 468, 354]], -1)
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=0)
    first = torch.log_softmax(model.lm_head(last), -1)
    deeper = torch.log_softmax(model.lm_head(nodes), -1)
    sums = torch.stack(
        [
            first[:, 30] + deeper[:, 0, 2],
            first[:, 30] + deeper[:, 0, 41] + deeper[:, 1, 2],
            first[:, 30] + deeper[:, 0, 52] + deeper[:, 2, 2],
            first[:, 77] + deeper[:, 3, 2],
        ],
        -1,
    )
    torch.testing.assert_close(
        label_scores(model, last, nodes, BRANCHES), torch.log_softmax(sums, -1), atol=1e-5, rtol=0
    )


def test_scores_that_are_not_finite_are_an_error_that_counts_the_tickets(tiny_model: Callable[[str], Path]) -> None:
    model = load_weights(tiny_model("llama"), "float32")
    last = torch.randn(5, 32)
    last[1], last[4, 0] = float("nan"), float("inf")
    with pytest.raises(ScoringError, match="2 of 5 tickets"):
        label_scores(model, last, torch.zeros(5, 0, 32), SINGLE)


@pytest.mark.parametrize("execution", ["packed", "padded"])
@pytest.mark.parametrize("labels", [("billing", "returns"), ("account", "account access", "billing")])
def test_the_prefix_is_bit_for_bit_the_same_after_a_thousand_batches(
    make_engine: Callable[..., Engine], execution: str, labels: tuple[str, ...]
) -> None:
    engine = make_engine("gemma3" if execution == "packed" else "llama", execution=execution, labels=labels)
    tensors = (*engine.prefix.keys, *engine.prefix.values)
    before = [tensor.clone() for tensor in tensors]
    random = np.random.default_rng(0)
    tickets = [random.integers(3, 500, length) for length in (5, 4, 1)]
    first = engine.score(tickets)
    for number in range(1000):
        last = engine.score(tickets[number % 3 :])
    assert len(before) == 6
    assert all(tensor.shape[2] == len(engine.spec.prompt.prefix_ids) for tensor in tensors)
    assert all(torch.equal(old, new) for old, new in zip(before, tensors, strict=True))
    np.testing.assert_array_equal(last, engine.score(tickets[0:]))
    np.testing.assert_array_equal(first, engine.score(tickets))
