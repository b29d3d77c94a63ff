"""Scores of a batch: one forward pass, packed or padded, and the label rows of the output matrix."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from ticket_engine import last_layer
from ticket_engine.attention import Group, PackedLayout, query_blocks
from ticket_engine.errors import ScoringError
from ticket_engine.label_trie import LabelTrie


@dataclass(frozen=True, slots=True)
class PrefixCache:
    """Keys and values of the prompt prefix, one pair a layer, batch 1. Never written after it is made.

    ``length`` 0 means no prefix: every ticket then carries its whole prompt.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    length: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Suffixes of the tickets of one forward pass, longest first, laid end to end.

    Attributes:
        token_ids: int64 ``(sum of lengths,)``.
        lengths: At least 1 each, int64 ``(tickets,)``.
    """

    token_ids: np.ndarray
    lengths: np.ndarray


def compute_prefix(model: PreTrainedModel, prefix_ids: tuple[int, ...]) -> PrefixCache:
    """Keys and values of the prompt prefix, from one pass of the stock model."""
    if not prefix_ids:
        return PrefixCache((), (), 0)
    cache = DynamicCache(config=model.config)
    decoder(model)(torch.tensor([prefix_ids]), cache=cache, use_cache=True)
    keys = tuple(layer.keys for layer in cache.layers)
    values = tuple(layer.values for layer in cache.layers)
    return PrefixCache(keys, values, len(prefix_ids))


def decoder(model: PreTrainedModel) -> nn.Module:
    """The model without its output matrix."""
    return model.get_decoder()


def packed_hidden(model: PreTrainedModel, batch: Batch, prefix: PrefixCache, trie: LabelTrie) -> tuple[Tensor, Tensor]:
    """Last hidden states after each ticket and at each label node, from a pass without padding.

    Args:
        model: A view whose attention is `attention.PACKED`.
        batch: The tickets.
        prefix: Cache of the prompt prefix; not modified.
        trie: Label nodes, appended to every ticket.

    Returns:
        ``(tickets, hidden)`` and ``(tickets, nodes, hidden)``, in the model's dtype.
    """
    token_ids, positions, layout = pack(batch, prefix, trie)
    ends = torch.from_numpy(np.cumsum(batch.lengths + trie.nodes))
    rows = ends[:, None] - trie.nodes - 1 + torch.arange(trie.nodes + 1)
    with last_layer.needed_rows(rows.flatten()):
        hidden = decoder(model)(token_ids, position_ids=positions, use_cache=False, layout=layout).last_hidden_state[0]
    picked = hidden[rows]
    return picked[:, 0], picked[:, 1:]


def pack(batch: Batch, prefix: PrefixCache, trie: LabelTrie) -> tuple[Tensor, Tensor, PackedLayout]:
    """Token ids and positions ``(1, tokens)`` of the row, and its layout."""
    rows = batch.lengths + trie.nodes
    starts = np.cumsum(rows) - rows
    within = np.arange(rows.sum()) - np.repeat(starts, rows)
    lengths = np.repeat(batch.lengths, rows)
    is_node = within >= lengths
    ids = np.empty(len(within), dtype=np.int64)
    ids[~is_node] = batch.token_ids
    ids[is_node] = np.tile(trie.token_ids, len(rows))
    positions = prefix.length + within
    positions[is_node] = prefix.length + (lengths[is_node] - 1) + np.tile(trie.depths, len(rows))
    layout = packed_layout(batch.lengths, prefix, trie)
    return torch.from_numpy(ids)[None], torch.from_numpy(positions)[None], layout


def packed_layout(lengths: np.ndarray, prefix: PrefixCache, trie: LabelTrie) -> PackedLayout:
    """Where tickets of these suffix lengths lie when they stand end to end."""
    rows = lengths + trie.nodes
    starts = np.cumsum(rows) - rows
    edges = np.flatnonzero(np.diff(rows, prepend=-1))
    counts = np.diff(edges, append=len(rows))
    groups = tuple(
        Group(int(starts[edge]), int(count), int(rows[edge]), query_blocks(int(rows[edge]), trie.ancestors))
        for edge, count in zip(edges, counts, strict=True)
    )
    return PackedLayout(groups, prefix.keys, prefix.values)


def padded_hidden(model: PreTrainedModel, batch: Batch, prefix: PrefixCache, trie: LabelTrie) -> tuple[Tensor, Tensor]:
    """The same as `packed_hidden` from a right-padded pass of the stock model.

    Without label nodes the causal mask alone is right: no real token sees the padding behind it.
    """
    rows = batch.lengths + trie.nodes
    width = int(rows.max())
    ids = np.zeros((len(rows), width), dtype=np.int64)
    positions = np.zeros_like(ids)
    packed_ids, packed_positions, _ = pack(batch, prefix, trie)
    real = np.arange(width)[None] < rows[:, None]
    ids[real], positions[real] = packed_ids[0].numpy(), packed_positions[0].numpy()
    cache = None
    if prefix.length:
        cache = DynamicCache(config=model.config)
        for index, (keys, values) in enumerate(zip(prefix.keys, prefix.values, strict=True)):
            cache.update(keys.expand(len(rows), -1, -1, -1), values.expand(len(rows), -1, -1, -1), index)
    hidden = decoder(model)(
        torch.from_numpy(ids),
        position_ids=torch.from_numpy(positions),
        attention_mask=_padded_mask(batch, prefix, trie, width) if trie.nodes else None,
        cache=cache,
        use_cache=cache is not None,
    ).last_hidden_state
    last = torch.from_numpy(batch.lengths)
    tickets = torch.arange(len(rows))
    nodes = hidden[tickets[:, None], last[:, None] + torch.arange(trie.nodes)]
    return hidden[tickets, last - 1], nodes


def _padded_mask(batch: Batch, prefix: PrefixCache, trie: LabelTrie, width: int) -> Tensor:
    """bool ``(tickets, 1, width, prefix + width)``, True where a query may look."""
    own = np.tri(width, dtype=bool)[None].repeat(len(batch.lengths), 0)
    for row, length in enumerate(batch.lengths):
        own[row, length : length + trie.nodes, length : length + trie.nodes] = trie.ancestors
    front = np.ones((len(batch.lengths), width, prefix.length), dtype=bool)
    return torch.from_numpy(np.concatenate([front, own], 2))[:, None]


def label_scores(model: PreTrainedModel, last: Tensor, nodes: Tensor, trie: LabelTrie) -> Tensor:
    """Log-probability of each label over the label set.

    ``scores[i, j] = sum over the label's tokens of log P(token | prompt, ticket i, tokens before it)``,
    then normalised over the labels. The normaliser of the first token is the same for all labels and
    falls away, so a set of one-token labels needs the label rows of the output matrix only; deeper
    nodes need the whole vocabulary.

    Args:
        model: Gives the output matrix; bias, scale and soft cap are applied where it has them.
        last: Hidden states after each ticket, ``(tickets, hidden)``.
        nodes: Hidden states at the label nodes, ``(tickets, nodes, hidden)``.
        trie: The labels.

    Returns:
        float32 ``(tickets, labels)``, natural log; the exponentials of a row sum to 1.

    Raises:
        ScoringError: A score is not finite.
    """
    first_tokens = torch.tensor([path[0][1] for path in trie.edges])
    scores = _logits(model, last, first_tokens)
    if trie.nodes:
        scores = scores + _deeper_scores(model, nodes, trie)
    result = torch.log_softmax(scores, -1)
    if not torch.isfinite(result).all():
        bad = int((~torch.isfinite(result)).any(-1).sum())
        raise ScoringError(f"{bad} of {len(result)} tickets of a batch have scores that are not finite.")
    return result


def _deeper_scores(model: PreTrainedModel, nodes: Tensor, trie: LabelTrie) -> Tensor:
    """Sum over each label's tokens after the first, ``(tickets, labels)``."""
    edges = sorted({edge for path in trie.edges for edge in path[1:]})
    log_probs = {}
    for node in sorted({node for node, _ in edges}):
        logits = _logits(model, nodes[:, node], None)
        normaliser = torch.logsumexp(logits, -1)
        for other, token in edges:
            if other == node:
                log_probs[other, token] = logits[:, token] - normaliser
    zero = torch.zeros(len(nodes))
    return torch.stack([sum((log_probs[edge] for edge in path[1:]), zero) for path in trie.edges], -1)


def _logits(model: PreTrainedModel, hidden: Tensor, tokens: Tensor | None) -> Tensor:
    """float32 logits of some tokens (in float32 throughout) or of the whole vocabulary."""
    head = model.get_output_embeddings()
    if tokens is None:
        logits = head(hidden).float()
    else:
        bias = None if head.bias is None else head.bias[tokens].float()
        logits = nn.functional.linear(hidden.float(), head.weight[tokens].float(), bias)
    config = model.config.get_text_config()
    factor = (getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
    logits = logits if factor == 1 else logits * factor
    softcap = getattr(config, "final_logit_softcapping", None)
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap
