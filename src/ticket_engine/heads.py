"""A fitted head: weights on lexical features and pooled hidden states, in stages of growing depth.

Stage 0 reads the text alone and costs no forward pass; each later stage needs the model down to its
depth and sees everything that the stages before it saw::

    text ── lexical features ─► stage 0 ── sure enough? ─► label
                                   │ no
    layers 1..d1 ── mean ───────► stage 1 ── sure enough? ─► label
                                   │ no
    layers d1..d2 ── mean, last ► stage 2 ────────────────► label

A stage's scores are ``sum over blocks of features @ weights + bias``; its log-probabilities are
``log_softmax(temperature * scores)``. What a ticket gets depends on that ticket alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import sparse

from ticket_engine.calibration import log_softmax
from ticket_engine.errors import HeadError
from ticket_engine.lexical import Lexicon, lexical_features

MEAN, LAST = "mean", "last"


@dataclass(frozen=True, slots=True, order=True)
class Block:
    """One pooling of one depth: ``mean`` over the ticket's own tokens, or the ``last`` position."""

    depth: int
    pooling: str

    @property
    def key(self) -> str:
        """Name in files, such as ``mean_6``."""
        return f"{self.pooling}_{self.depth}"


@dataclass(frozen=True, slots=True)
class Scaling:
    """What makes a block's columns comparable: ``(x - mean) * factor``, then rows of length 1."""

    mean: np.ndarray
    factor: np.ndarray


@dataclass(frozen=True, slots=True)
class Stage:
    """One decision.

    Attributes:
        depth: Layers of the model that it needs; 0 for the lexical stage.
        lexical_weights: float32 ``(lexicon columns, labels)``.
        hidden_weights: float32 ``(hidden, labels)`` a block.
        bias: float32 ``(labels,)``.
        temperature: Factor on the scores.
        threshold: Least confidence at which a ticket stops here; above 1 for never, 0 for always.
    """

    depth: int
    lexical_weights: np.ndarray
    hidden_weights: Mapping[Block, np.ndarray]
    bias: np.ndarray
    temperature: float
    threshold: float


@dataclass(frozen=True, slots=True)
class HeadIdentity:
    """Hashes (SHA-256, hexadecimal) of what a head belongs to."""

    model_hash: str
    prompt_hash: str
    labels_hash: str
    rows_hash: str


@dataclass(frozen=True, slots=True)
class Head:
    """All that a run needs to label tickets.

    Attributes:
        labels: Class ids, the order of all label columns.
        identity: What it belongs to.
        lexicon: Of the lexical features.
        scalings: One a block.
        stages: By growing depth; the last decides every ticket.
        held_out_confidence: Confidence of the staged decision on held-out fitting tickets that chose nothing, float32.
        held_out_correct: Whether it was right there, bool.
        fitted_texts: Hashes of the labelled texts that it was fitted on, see `fitted_texts.hash_texts`; growing.
        report: What fitting measured, for people and manifests.
    """

    labels: tuple[str, ...]
    identity: HeadIdentity
    lexicon: Lexicon
    scalings: Mapping[Block, Scaling]
    stages: tuple[Stage, ...]
    held_out_confidence: np.ndarray
    held_out_correct: np.ndarray
    fitted_texts: np.ndarray
    report: Mapping[str, object]

    @property
    def depths(self) -> tuple[int, ...]:
        """Depths at which stages after stage 0 decide, growing; empty if the text alone is enough."""
        return tuple(stage.depth for stage in self.stages if stage.depth)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Hidden features that the forward pass must collect, by depth."""
        return tuple(sorted({block for stage in self.stages for block in stage.hidden_weights}))


def apply_head(
    head: Head, lexical: sparse.csr_array, hidden: Mapping[Block, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities and deciding stage of each ticket, all hidden features at hand.

    Args:
        head: The head.
        lexical: From `lexical_features`, ``(tickets, columns)``.
        hidden: float32 ``(tickets, hidden)`` for each of ``head.blocks``.

    Returns:
        float32 ``(tickets, labels)``, natural log, and int32 ``(tickets,)``, an index into ``head.stages``.
    """
    log_probs = stage_log_probs(head, 0, lexical, hidden)
    stage_of = np.zeros(len(log_probs), dtype=np.int32)
    open_rows = np.flatnonzero(~is_decided(head, 0, log_probs))
    for index in range(1, len(head.stages)):
        if not len(open_rows):
            break
        part = {block: values[open_rows] for block, values in hidden.items()}
        deeper = stage_log_probs(head, index, lexical[open_rows], part)
        log_probs[open_rows] = deeper
        stage_of[open_rows] = index
        open_rows = open_rows[~is_decided(head, index, deeper)]
    return log_probs, stage_of


def stage_log_probs(
    head: Head, index: int, lexical: sparse.csr_array, hidden: Mapping[Block, np.ndarray]
) -> np.ndarray:
    """Calibrated log-probabilities of one stage, float32 ``(tickets, labels)``.

    Args:
        head: The head.
        index: Of the stage.
        lexical: Features of these tickets.
        hidden: At least the stage's blocks, rows in the same order; not modified.

    Raises:
        HeadError: A block is missing or has another width than the head was fitted on.
    """
    stage = head.stages[index]
    scores = (lexical @ stage.lexical_weights).astype(np.float64) + stage.bias
    for block, weights in stage.hidden_weights.items():
        values = hidden.get(block)
        if values is None or values.shape[1] != len(weights):
            found = "nothing" if values is None else f"{values.shape[1]} columns"
            raise HeadError(f"Stage {index} of the head reads {block.key} with {len(weights)} columns, found {found}.")
        scores += scaled(values, head.scalings[block]) @ weights
    return log_softmax(stage.temperature * scores).astype(np.float32)


def is_decided(head: Head, index: int, log_probs: np.ndarray) -> np.ndarray:
    """bool ``(tickets,)``: sure enough to stop at this stage. All True at the last one."""
    if index == len(head.stages) - 1:
        return np.ones(len(log_probs), dtype=bool)
    return np.exp(log_probs.max(1)) >= head.stages[index].threshold


def decide_by_text(head: Head, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Stage 0 before any planning: log-probabilities of all tickets, and which of them need no model.

    Returns:
        float32 ``(texts, labels)`` and bool ``(texts,)``.
    """
    log_probs = stage_log_probs(head, 0, lexical_features(texts, head.lexicon), {})
    return log_probs, is_decided(head, 0, log_probs)


def scaled(values: np.ndarray, scaling: Scaling) -> np.ndarray:
    """A block's rows as the weights expect them, float32, each of length 1."""
    made = (values.astype(np.float32) - scaling.mean) * scaling.factor
    return made / np.maximum(np.linalg.norm(made, axis=1, keepdims=True), 1e-12)


def fit_scaling(values: np.ndarray) -> Scaling:
    """Mean and inverse standard deviation a column; columns that never vary count nothing."""
    deviation = values.std(0)
    moves = deviation > 1e-6 * max(float(deviation.max()), 1e-12)
    factor = np.where(moves, 1 / np.where(moves, deviation, 1), 0)
    return Scaling(values.mean(0).astype(np.float32), factor.astype(np.float32))


def check_identity(head: Head, *, model_hash: str, prompt_hash: str, labels_hash: str) -> None:
    """Refuse a head that was fitted for something else.

    Raises:
        HeadError: Model, labels or prompt differ; named in the message.
    """
    found = {"labels file": labels_hash, "model": model_hash, "prompt": prompt_hash}
    own = head.identity
    wanted = {"labels file": own.labels_hash, "model": own.model_hash, "prompt": own.prompt_hash}
    for name, value in wanted.items():
        if found[name] != value:
            raise HeadError(
                f"The head was fitted for another {name} (hash {value[:12]}, this run has {found[name][:12]}). "
                f"Give the {name} it was fitted with, or fit a new head with python -m flows.fit_labels."
            )
