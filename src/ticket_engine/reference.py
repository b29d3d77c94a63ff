"""The slow scorer that every other one is measured against: one ticket, whole prompt, stock model."""

import copy

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ticket_engine.label_trie import LabelTrie
from ticket_engine.scoring import decoder, label_scores


def reference_scores(model: PreTrainedModel, prompt_ids: list[int], trie: LabelTrie) -> Tensor:
    """Log-probability of each label after one whole prompt.

    One pass over the prompt as transformers does it: no padding, no packing, no prefix cache. Labels of
    several tokens go on from a copy of that pass's own keys and values, one label beginning at a time; a
    model that keeps a state instead (recurrent layers) reads the whole prompt again for each.

    Args:
        model: The stock model.
        prompt_ids: Prefix, ticket and ending.
        trie: The labels.

    Returns:
        float32 ``(labels,)``, natural log, normalised over the labels.

    Raises:
        ScoringError: A score is not finite.
    """
    cache = DynamicCache(config=model.config) if trie.nodes and _keeps_keys(model) else None
    hidden = decoder(model)(torch.tensor([prompt_ids]), cache=cache, use_cache=cache is not None).last_hidden_state
    nodes = torch.zeros(1, trie.nodes, hidden.shape[-1], dtype=hidden.dtype)
    inner = {node for path in trie.edges for node, _ in path if node >= 0}
    for node in sorted(inner - {int(parent) for row in range(trie.nodes) for parent in _strict(trie, row)}):
        path = [int(step) for step in trie.ancestors[node].nonzero()[0]]
        ids = [int(trie.token_ids[step]) for step in path]
        if cache is None:
            deeper = decoder(model)(torch.tensor([[*prompt_ids, *ids]]), use_cache=False).last_hidden_state
        else:
            deeper = decoder(model)(torch.tensor([ids]), cache=copy.deepcopy(cache), use_cache=True).last_hidden_state
        nodes[0, path] = deeper[0, -len(path) :]
    return label_scores(model, hidden[:, -1], nodes, trie)[0]


def own_scores(model: PreTrainedModel, prompt_ids: list[int], label_ids: tuple[tuple[int, ...], ...]) -> Tensor:
    """The same from the model's own logits, one whole pass a label.

    Models differ in what they do to their output (soft caps, scales); `engine.load_engine` compares.
    """
    sums = []
    for ids in label_ids:
        logits = model(input_ids=torch.tensor([[*prompt_ids, *ids]]), use_cache=False).logits[0].float()
        log_probs = torch.log_softmax(logits[len(prompt_ids) - 1 : -1], -1)
        sums.append(log_probs.gather(-1, torch.tensor(ids)[:, None]).sum())
    return torch.log_softmax(torch.stack(sums), -1)


def _keeps_keys(model: PreTrainedModel) -> bool:
    """Whether all that a pass leaves behind are keys and values, so that another can go on from a copy."""
    layers = DynamicCache(config=model.config).layers
    return not model._is_stateful and all(isinstance(layer, DynamicLayer) for layer in layers)


def _strict(trie: LabelTrie, row: int) -> list[int]:
    """Ancestors of a node without itself."""
    return [int(column) for column in trie.ancestors[row].nonzero()[0] if column != row]
