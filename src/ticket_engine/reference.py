"""The slow scorer that every other one is measured against: one ticket, whole prompt, stock model."""

import copy

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ticket_engine.label_trie import LabelTrie
from ticket_engine.scoring import decoder, label_scores


def reference_scores(model: PreTrainedModel, prompt_ids: list[int], trie: LabelTrie) -> Tensor:
    """Log-probability of each label after one whole prompt.

    One pass over the prompt as transformers does it: no padding, no packing, no prefix cache. Labels of
    several tokens go on from a copy of that pass's own keys and values, one label beginning at a time.

    Args:
        model: The stock model.
        prompt_ids: Prefix, ticket and ending.
        trie: The labels.

    Returns:
        float32 ``(labels,)``, natural log, normalised over the labels.

    Raises:
        ScoringError: A score is not finite.
    """
    cache = DynamicCache(config=model.config) if trie.nodes else None
    hidden = decoder(model)(torch.tensor([prompt_ids]), cache=cache, use_cache=cache is not None).last_hidden_state
    nodes = torch.zeros(1, trie.nodes, hidden.shape[-1], dtype=hidden.dtype)
    inner = {node for path in trie.edges for node, _ in path if node >= 0}
    for node in sorted(inner - {int(parent) for row in range(trie.nodes) for parent in _strict(trie, row)}):
        path = [int(step) for step in trie.ancestors[node].nonzero()[0]]
        ids = torch.tensor([[int(trie.token_ids[step]) for step in path]])
        deeper = decoder(model)(ids, cache=copy.deepcopy(cache), use_cache=True).last_hidden_state
        nodes[0, path] = deeper[0]
    return label_scores(model, hidden[:, -1], nodes, trie)[0]


def _strict(trie: LabelTrie, row: int) -> list[int]:
    """Ancestors of a node without itself."""
    return [int(column) for column in trie.ancestors[row].nonzero()[0] if column != row]
