import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ticket_engine.label_trie import build_trie

END = 99
label_sets = st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=8, unique=True
).map(lambda labels: tuple((*ids, END) for ids in labels))


def path_to(trie, node: int) -> list[int]:
    """Tokens from the root to a node, by its ancestors in the order of their depths."""
    ancestors = sorted(np.flatnonzero(trie.ancestors[node]).tolist(), key=lambda other: trie.depths[other])
    return [int(trie.token_ids[other]) for other in ancestors]


def test_labels_of_one_token_need_no_node() -> None:
    trie = build_trie(((5,), (7,), (9,)))
    assert trie.nodes == 0
    assert trie.edges == (((-1, 5),), ((-1, 7),), ((-1, 9),))
    assert trie.ancestors.shape == (0, 0)


def test_labels_with_shared_beginnings_share_their_nodes() -> None:
    account, access, closure, billing = 1, 2, 3, 4
    trie = build_trie(((account, END), (account, access, END), (account, closure, END), (billing, END)))
    assert trie.nodes == 4  # account, account access, account closure, billing
    assert [path_to(trie, node) for node in range(4)] == [[account], [account, access], [account, closure], [billing]]
    assert trie.depths.tolist() == [1, 2, 2, 1]


@given(labels=label_sets)
@settings(deadline=None, max_examples=200)
def test_the_edges_of_a_label_spell_it_and_each_starts_where_the_one_before_leads(labels) -> None:
    trie = build_trie(labels)
    for ids, edges in zip(labels, trie.edges, strict=True):
        assert tuple(token for _, token in edges) == ids
        assert edges[0][0] == -1
        for step, (node, _) in enumerate(edges[1:], 1):
            assert path_to(trie, node) == list(ids[:step])
            assert trie.depths[node] == step


@given(labels=label_sets)
@settings(deadline=None, max_examples=200)
def test_there_is_one_node_for_each_proper_beginning_and_parents_come_first(labels) -> None:
    trie = build_trie(labels)
    beginnings = {ids[:length] for ids in labels for length in range(1, len(ids))}
    assert {tuple(path_to(trie, node)) for node in range(trie.nodes)} == beginnings
    assert trie.nodes == len(beginnings)
    assert trie.ancestors.diagonal().all()
    assert not np.triu(trie.ancestors, 1).any()
