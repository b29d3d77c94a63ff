"""The labels' token ids as a trie, so that one pass scores labels of any number of tokens.

Proper beginnings of labels are the trie's inner nodes. Each becomes one extra row behind a ticket that
sees the prompt, the ticket and its own ancestors, so that the same forward pass gives the distribution
after every beginning. Labels of a single token need no node. Example::

    account END, account access END, billing END     (END tells a label from a longer one)
    root ── account ── END           nodes: [account], [account access], [billing]
         │          └─ access ─ END
         └─ billing ── END
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class LabelTrie:
    """Inner nodes of the trie below the root, parents before children.

    Attributes:
        token_ids: Token of each node, int64 ``(nodes,)``.
        depths: Tokens from the root, at least 1, int64 ``(nodes,)``.
        ancestors: bool ``(nodes, nodes)``, True where the column is the row's ancestor or itself.
        edges: For each label, pairs ``(node, token id)`` whose log-probabilities add up to the label's;
            node -1 is the root, the ticket's last position.
    """

    token_ids: np.ndarray
    depths: np.ndarray
    ancestors: np.ndarray
    edges: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def nodes(self) -> int:
        """Inner nodes below the root."""
        return len(self.token_ids)


def build_trie(label_ids: tuple[tuple[int, ...], ...]) -> LabelTrie:
    """The trie of token sequences, none of which begins another.

    Args:
        label_ids: At least one token a label.
    """
    index: dict[tuple[int, ...], int] = {}
    for ids in label_ids:
        for length in range(1, len(ids)):
            index.setdefault(ids[:length], len(index))
    ancestors = np.zeros((len(index), len(index)), dtype=bool)
    for path, node in index.items():
        for length in range(1, len(path) + 1):
            ancestors[node, index[path[:length]]] = True
    edges = tuple(
        tuple((index[ids[:length]] if length else -1, ids[length]) for length in range(len(ids))) for ids in label_ids
    )
    return LabelTrie(
        token_ids=np.array([path[-1] for path in index], dtype=np.int64),
        depths=np.array([len(path) for path in index], dtype=np.int64),
        ancestors=ancestors,
        edges=edges,
    )
