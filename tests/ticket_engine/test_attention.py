import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ticket_engine.attention import BLOCK_ROWS, MAX_SCORES, packed_attention, query_blocks
from ticket_engine.label_trie import LabelTrie, build_trie
from ticket_engine.scoring import Batch, PrefixCache, pack

NO_NODES = build_trie(((1,), (2,)))
BRANCHES = build_trie(((1, 9), (1, 2, 9), (1, 3, 9), (4, 9)))
SIZE = 4
LAYER = 1


class Layer(nn.Module):
    """What the attention function needs of a transformers layer: its place in the model."""

    layer_idx = LAYER


def random_tensor(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def prefix_of(length: int, key_heads: int) -> PrefixCache:
    """Keys and values of three layers, all different."""
    if not length:
        return PrefixCache((), (), 0)
    keys = tuple(random_tensor(10 + layer, 1, key_heads, length, SIZE) for layer in range(3))
    values = tuple(random_tensor(20 + layer, 1, key_heads, length, SIZE) for layer in range(3))
    return PrefixCache(keys, values, length)


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: np.ndarray,
    prefix: PrefixCache,
    trie: LabelTrie,
    *,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """The same in float64, one ticket, one head and one row at a time."""
    heads, key_heads = query.shape[1], key.shape[1]
    output = torch.zeros(1, query.shape[2], heads, SIZE, dtype=torch.float64)
    start = 0
    for length in lengths.tolist():
        for head in range(heads):
            own = head // (heads // key_heads)
            for row in range(length + trie.nodes):
                seen = list(range(min(row + 1, length)))
                if row >= length:
                    seen += [length + other for other in np.flatnonzero(trie.ancestors[row - length])]
                keys, values = key[0, own, start:][seen], value[0, own, start:][seen]
                if prefix.length:
                    keys = torch.cat([prefix.keys[LAYER][0, own], keys])
                    values = torch.cat([prefix.values[LAYER][0, own], values])
                scores = keys.double() @ query[0, head, start + row].double() * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                output[0, start + row, head] = torch.softmax(scores, 0) @ values.double()
        start += length + trie.nodes
    return output


def compare(
    lengths: list[int],
    *,
    heads: int = 4,
    key_heads: int = 2,
    prefix_length: int = 0,
    trie: LabelTrie = NO_NODES,
    scaling: float | None = None,
    softcap: float | None = None,
) -> None:
    rows = np.array(lengths, dtype=np.int64)
    prefix = prefix_of(prefix_length, key_heads)
    _, _, layout = pack(Batch(np.zeros(rows.sum(), dtype=np.int64), rows), prefix, trie)
    tokens = int(rows.sum()) + trie.nodes * len(rows)
    query = random_tensor(1, 1, heads, tokens, SIZE)
    key, value = random_tensor(2, 1, key_heads, tokens, SIZE), random_tensor(3, 1, key_heads, tokens, SIZE)
    made, weights = packed_attention(
        Layer(), query, key, value, None, scaling=scaling, softcap=softcap, layout=layout, dropout=0.0
    )
    scale = SIZE**-0.5 if scaling is None else scaling
    expected = dense_attention(query, key, value, rows, prefix, trie, scale=scale, softcap=softcap)
    assert weights is None
    assert made.shape == (1, tokens, heads, SIZE)
    torch.testing.assert_close(made.double(), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 2), (4, 4), (6, 1)])
@pytest.mark.parametrize("prefix_length", [0, 5])
@pytest.mark.parametrize("trie", [NO_NODES, BRANCHES])
def test_packed_attention_equals_one_row_at_a_time(
    heads: int, key_heads: int, prefix_length: int, trie: LabelTrie
) -> None:
    compare([9, 9, 9, 4, 1, 1], heads=heads, key_heads=key_heads, prefix_length=prefix_length, trie=trie)


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    prefix_length=st.integers(0, 6),
    branching=st.booleans(),
)
@settings(deadline=None, max_examples=15)
def test_packed_attention_is_right_for_any_lengths_in_any_order(
    lengths: list[int], prefix_length: int, branching: bool
) -> None:
    compare(lengths, heads=2, key_heads=1, prefix_length=prefix_length, trie=BRANCHES if branching else NO_NODES)


@pytest.mark.parametrize("length", [BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, 2 * BLOCK_ROWS + 3])
def test_tickets_longer_than_a_block_of_queries_are_right(length: int) -> None:
    compare([length, 3], heads=1, key_heads=1, prefix_length=2, trie=BRANCHES)


def test_more_tickets_of_one_length_than_one_step_takes_are_right() -> None:
    tickets = 2 * MAX_SCORES // (BLOCK_ROWS * 16 * BLOCK_ROWS) + 3
    lengths = [BLOCK_ROWS] * tickets
    rows = np.array(lengths, dtype=np.int64)
    _, _, layout = pack(Batch(np.zeros(rows.sum(), dtype=np.int64), rows), prefix_of(0, 1), NO_NODES)
    query, key, value = (random_tensor(seed, 1, 16 if seed == 1 else 1, rows.sum(), SIZE) for seed in (1, 2, 3))
    made, _ = packed_attention(Layer(), query, key, value, None, layout=layout)
    expected = torch.cat(
        [
            nn.functional.scaled_dot_product_attention(
                query[:, :, part], key[:, :, part], value[:, :, part], is_causal=True, enable_gqa=True
            )
            for part in (slice(first, first + BLOCK_ROWS) for first in range(0, int(rows.sum()), BLOCK_ROWS))
        ],
        2,
    )
    torch.testing.assert_close(made, expected.transpose(1, 2), atol=2e-6, rtol=0)


def test_the_models_scale_and_soft_cap_are_used() -> None:
    compare([7, 5], prefix_length=3, trie=BRANCHES, scaling=0.9, softcap=0.5)


@given(length=st.integers(1, 700), branching=st.booleans())
@settings(deadline=None, max_examples=60)
def test_blocks_cover_every_row_once_and_none_is_longer_than_the_limit(length: int, branching: bool) -> None:
    trie = BRANCHES if branching else NO_NODES
    blocks = query_blocks(length + trie.nodes, trie.ancestors)
    assert [block.first for block in blocks] == [0, *(block.end for block in blocks[:-1])]
    assert blocks[-1].end == length + trie.nodes
    assert max(block.end - block.first for block in blocks) <= BLOCK_ROWS


def test_the_prefix_is_not_written() -> None:
    prefix = prefix_of(6, 2)
    before = [tensor.clone() for tensor in (*prefix.keys, *prefix.values)]
    rows = np.array([5, 5, 2])
    _, _, layout = pack(Batch(np.zeros(12, dtype=np.int64), rows), prefix, NO_NODES)
    packed_attention(
        Layer(),
        random_tensor(1, 1, 2, 12, SIZE),
        random_tensor(2, 1, 2, 12, SIZE),
        random_tensor(3, 1, 2, 12, SIZE),
        None,
        layout=layout,
    )
    assert all(torch.equal(old, new) for old, new in zip(before, (*prefix.keys, *prefix.values), strict=True))
