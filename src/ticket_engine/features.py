"""Hidden states of tickets at chosen depths, from one packed pass that runs no deeper than asked."""

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ticket_engine.label_trie import build_trie
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


def decoder_segment(model: PreTrainedModel, start: int, stop: int) -> nn.Module:
    """Layers ``[start, stop)`` of a model as a module of their own, over the same weights.

    The final norm belongs to the segment that ends the model. Layers keep their numbers, so that they
    find their prefix's keys and values.
    """
    whole = model.get_decoder()
    part = copy.copy(whole)
    part._modules = dict(whole._modules)
    part.layers = nn.ModuleList(whole.layers[start:stop])
    if stop < len(whole.layers):
        part.norm = nn.Identity()
    part.config = copy.deepcopy(whole.config)
    part.config.num_hidden_layers = stop - start
    if getattr(part.config, "layer_types", None):
        part.config.layer_types = part.config.layer_types[start:stop]
    return part


def collect_features(
    segments: list[nn.Module], batch: Batch, prefix: PrefixCache, own: tuple[np.ndarray, np.ndarray]
) -> list[Features]:
    """Features after each of a chain of segments.

    Args:
        segments: From `decoder_segment` of the packed view, each beginning where the one before ends.
        batch: Suffixes, longest first.
        prefix: Cache of the prompt prefix; not modified.
        own: First row of each ticket's own tokens within its suffix, and their number, int64 ``(tickets,)``.
    """
    token_ids, positions, layout = pack(batch, prefix, _NO_NODES)
    ends = np.cumsum(batch.lengths)
    first, count = own
    starts = ends - batch.lengths + first
    rows = np.repeat(starts, count) + _within(count)
    ticket_of = torch.from_numpy(np.repeat(np.arange(len(count)), count))
    collected, hidden = [], None
    for segment in segments:
        inputs = {"input_ids": token_ids} if hidden is None else {"inputs_embeds": hidden}
        hidden = segment(**inputs, position_ids=positions, use_cache=False, layout=layout).last_hidden_state
        collected.append(_pool(hidden[0], torch.from_numpy(rows), ticket_of, torch.from_numpy(ends - 1), count))
    return collected


def _pool(hidden: Tensor, rows: Tensor, ticket_of: Tensor, last: Tensor, count: np.ndarray) -> Features:
    total = torch.zeros(len(count), hidden.shape[1])
    total.index_add_(0, ticket_of, hidden[rows].float())
    mean = total / torch.from_numpy(count)[:, None]
    return Features(hidden[last].float().numpy(), mean.numpy())


def _within(count: np.ndarray) -> np.ndarray:
    """0, 1, ... within each run of ``count`` rows."""
    return np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
