"""One packed pass in which tickets leave as soon as a stage of a head is sure of them.

Between two depths the row gets shorter: tickets that are decided are cut out and the rest goes on from
where it is, nothing is computed twice. What a ticket gets does not depend on who leaves beside it, up to
the rounding of matrix products::

    layers 1..6    [ticket a][ticket b][ticket c][ticket d]
                        │ stage at 6 is sure of a and c
    layers 7..30   [ticket b][ticket d]
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy import sparse
from torch import Tensor
from transformers import PreTrainedModel

from ticket_engine.errors import HeadError, ScoringError
from ticket_engine.heads import LAST, MEAN, Block, Head, is_decided, stage_log_probs
from ticket_engine.label_trie import build_trie
from ticket_engine.layer_walk import Rest, walk
from ticket_engine.scoring import Batch, PrefixCache, pack, packed_layout

_NO_NODES = build_trie(((0,),))


@dataclass(frozen=True, slots=True)
class StagedModel:
    """A head with the packed view that it reads.

    Attributes:
        head: The head.
        view: The packed view of the model.
        depths: After how many layers something is pooled, growing.
    """

    head: Head
    view: PreTrainedModel
    depths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Open:
    """Tickets still in the row: their places in the batch, suffix lengths, own tokens, and pooled blocks."""

    places: np.ndarray
    lengths: np.ndarray
    first: np.ndarray
    count: np.ndarray
    hidden: dict[Block, np.ndarray]

    def keep(self, rows: np.ndarray) -> "_Open":
        hidden = {block: values[rows] for block, values in self.hidden.items()}
        return _Open(self.places[rows], self.lengths[rows], self.first[rows], self.count[rows], hidden)


def staged_model(view: PreTrainedModel, head: Head) -> StagedModel:
    """A head over a packed view; no weight is copied.

    Raises:
        HeadError: The head needs more layers than the model has.
    """
    depths = tuple(sorted({block.depth for block in head.blocks} | set(head.depths)))
    layers = view.config.get_text_config().num_hidden_layers
    if depths and depths[-1] > layers:
        raise HeadError(
            f"The head reads layer {depths[-1]}, the model has {layers}. Give the model it was fitted with."
        )
    return StagedModel(head, view, depths)


def staged_pass(
    model: StagedModel,
    batch: Batch,
    own: tuple[np.ndarray, np.ndarray],
    *,
    prefix: PrefixCache,
    lexical: sparse.csr_array,
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities and deciding stage of tickets that the text alone left open.

    Args:
        model: From `staged_model`.
        batch: Suffixes, longest first.
        own: First row of each ticket's own tokens within its suffix, and their number, int64 ``(tickets,)``.
        prefix: Cache of the prompt prefix; not modified.
        lexical: Lexical features of the same tickets.

    Returns:
        float32 ``(tickets, labels)`` and int32 ``(tickets,)``, an index into ``head.stages``.

    Raises:
        ScoringError: A score is not finite.
    """
    head = model.head
    log_probs = np.full((len(batch.lengths), len(head.labels)), np.nan, dtype=np.float32)
    stage_of = np.zeros(len(batch.lengths), dtype=np.int32)
    stage_at = {stage.depth: index for index, stage in enumerate(head.stages) if stage.depth}
    tickets = _Open(np.arange(len(batch.lengths)), batch.lengths, *own, {})

    def visit(depth: int, hidden: Tensor) -> Rest | None:
        nonlocal tickets
        tickets = replace(tickets, hidden=tickets.hidden | _pool(hidden, tickets, depth, head))
        if depth not in stage_at:
            return None
        index = stage_at[depth]
        scored = stage_log_probs(head, index, lexical[tickets.places], tickets.hidden)
        if not np.isfinite(scored).all():
            raise ScoringError(
                f"A batch of {len(batch.lengths)} tickets has scores that are not finite at layer {depth}."
            )
        decided = is_decided(head, index, scored)
        log_probs[tickets.places[decided]], stage_of[tickets.places[decided]] = scored[decided], index
        if not decided.any():
            return None
        left = np.flatnonzero(~decided)
        rows = _rows_of(tickets.lengths, np.zeros_like(tickets.lengths), tickets.lengths, left)
        tickets = tickets.keep(left)
        return Rest(torch.from_numpy(rows), packed_layout(tickets.lengths, prefix, _NO_NODES))

    walk(model.view, pack(batch, prefix, _NO_NODES), model.depths, visit)
    return log_probs, stage_of


def _pool(hidden: Tensor, tickets: _Open, depth: int, head: Head) -> dict[Block, np.ndarray]:
    """The blocks of this depth that the head reads, float32 ``(tickets, hidden)``."""
    made = {}
    if Block(depth, MEAN) in head.blocks:
        everyone = np.arange(len(tickets.lengths))
        rows = torch.from_numpy(_rows_of(tickets.lengths, tickets.first, tickets.count, everyone))
        total = torch.zeros(len(tickets.count), hidden.shape[2])
        total.index_add_(0, torch.from_numpy(np.repeat(everyone, tickets.count)), hidden[0, rows].float())
        made[Block(depth, MEAN)] = (total / torch.from_numpy(tickets.count)[:, None]).numpy()
    if Block(depth, LAST) in head.blocks:
        ends = torch.from_numpy(np.cumsum(tickets.lengths) - 1)
        made[Block(depth, LAST)] = hidden[0, ends].float().numpy()
    return made


def _rows_of(lengths: np.ndarray, first: np.ndarray, count: np.ndarray, picked: np.ndarray) -> np.ndarray:
    """Row numbers ``start + first ... start + first + count - 1`` of the picked tickets, one after the other."""
    starts = (np.cumsum(lengths) - lengths + first)[picked]
    sizes = count[picked]
    return np.repeat(starts - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())
