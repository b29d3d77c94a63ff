"""Hidden states of tickets at chosen depths, from one packed pass that runs no deeper than asked."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ticket_engine.label_trie import build_trie
from ticket_engine.layer_walk import walk
from ticket_engine.scoring import Batch, PrefixCache, pack

_NO_NODES = build_trie(((0,),))


@dataclass(frozen=True, slots=True)
class Features:
    """Hidden states of tickets after a number of layers, float32 ``(tickets, hidden)`` each.

    Attributes:
        last: At the last position, where the model would answer.
        mean: Mean over the ticket's own tokens, without prompt.
    """

    last: np.ndarray
    mean: np.ndarray


def collect_features(
    view: PreTrainedModel,
    batch: Batch,
    own: tuple[np.ndarray, np.ndarray],
    depths: tuple[int, ...],
    prefix: PrefixCache,
) -> list[Features]:
    """Features after each of some numbers of layers.

    Args:
        view: The packed view.
        batch: Suffixes, longest first.
        own: First row of each ticket's own tokens within its suffix, and their number, int64 ``(tickets,)``.
        depths: Growing, at least 1.
        prefix: Cache of the prompt prefix; not modified.
    """
    ends = np.cumsum(batch.lengths)
    first, count = own
    starts = ends - batch.lengths + first
    rows = torch.from_numpy(np.repeat(starts, count) + _within(count))
    ticket_of = torch.from_numpy(np.repeat(np.arange(len(count)), count))
    collected: list[Features] = []

    def visit(_depth: int, hidden: Tensor) -> None:
        collected.append(_pool(hidden[0], rows, ticket_of, torch.from_numpy(ends - 1), count))

    walk(view, pack(batch, prefix, _NO_NODES), depths, visit)
    return collected


def distance_of_states(features: list[Features], own: list[Features]) -> float:
    """Largest difference between two scorers' features of the same tickets, as a share of a feature's length."""
    pairs = zip(features, own, strict=True)
    both = [(mine, theirs) for a, b in pairs for mine, theirs in ((a.last, b.last), (a.mean, b.mean))]
    return max(
        float((np.linalg.norm(mine - theirs, axis=1) / np.linalg.norm(theirs, axis=1)).max()) for mine, theirs in both
    )


def own_features(
    model: PreTrainedModel, prompt_ids: list[int], own: slice, depths: tuple[int, ...]
) -> dict[int, Features]:
    """The same for one ticket from the stock model's own hidden states over the whole prompt; rows of 1.

    Args:
        model: The stock model.
        prompt_ids: Prefix, ticket and ending.
        own: Where the ticket stands among them.
        depths: Numbers of layers; all of them means behind the final norm.
    """
    output = model.get_decoder()(torch.tensor([prompt_ids]), use_cache=False, output_hidden_states=True)
    layers = len(output.hidden_states) - 1
    states = {
        depth: output.hidden_states[depth][0] if depth < layers else output.last_hidden_state[0] for depth in depths
    }
    return {
        depth: Features(state[-1:].float().numpy(), state[own].float().mean(0, keepdim=True).numpy())
        for depth, state in states.items()
    }


def _pool(hidden: Tensor, rows: Tensor, ticket_of: Tensor, last: Tensor, count: np.ndarray) -> Features:
    total = torch.zeros(len(count), hidden.shape[1])
    total.index_add_(0, ticket_of, hidden[rows].float())
    mean = total / torch.from_numpy(count)[:, None]
    return Features(hidden[last].float().numpy(), mean.numpy())


def _within(count: np.ndarray) -> np.ndarray:
    """0, 1, ... within each run of ``count`` rows."""
    return np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
