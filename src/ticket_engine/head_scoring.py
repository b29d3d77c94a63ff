"""How a run labels tickets on a loaded engine: by the model's own label scores, or by a fitted head."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ticket_engine.engine import Engine, forget_engine, is_out_of_memory, load_engine
from ticket_engine.engine_spec import TOLERANCE, read_spec
from ticket_engine.errors import ModelError
from ticket_engine.head_files import load_head
from ticket_engine.heads import Head, is_decided, stage_log_probs
from ticket_engine.lexical import lexical_features
from ticket_engine.models import load_weights
from ticket_engine.scoring import Batch
from ticket_engine.staged_pass import StagedModel, staged_model, staged_pass

log = logging.getLogger(__name__)


class LabelScorer:
    """The model's own scores of the label names."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.labels = len(engine.spec.labels)

    def score(self, tickets: Sequence[np.ndarray], texts: Sequence[str]) -> tuple[np.ndarray, list[None]]:
        """Log-probabilities, float32 ``(tickets, labels)``, in one pass; no stages."""
        return self._engine.score(list(tickets)), [None] * len(tickets)

    def reference(self, ids: np.ndarray, text: str, depth: int | None = None) -> tuple[np.ndarray, None]:
        """The slow answer for one ticket, float32 ``(labels,)``; no stage."""
        return self._engine.reference(ids), None


class HeadScorer:
    """A head on an engine: knows which layers to run. Nothing in it changes after it is made."""

    def __init__(self, engine: Engine, head: Head, tolerance: float | None = None) -> None:
        """Prepare a head over the engine's packed view.

        Args:
            engine: Of the run.
            head: That decides.
            tolerance: Of the run whose answers are compared, natural log; the engine's own if None.

        Raises:
            ModelError: The engine's execution is not packed, or its hidden states are not the model's own.
            HeadError: The head needs more layers than the model has.
        """
        if engine.view is None:
            raise ModelError(f"A head needs execution packed; this model runs {engine.spec.execution}.")
        self.head = head
        self.labels = len(head.labels)
        self._depths = np.array([stage.depth for stage in head.stages])
        self._engine = engine
        self._tolerance = engine.spec.tolerance if tolerance is None else tolerance
        self._model: StagedModel = staged_model(engine.view, head)
        if self._model.depths:
            engine.check_features(self._model.depths)

    def score(self, tickets: Sequence[np.ndarray], texts: Sequence[str]) -> tuple[np.ndarray, list[int]]:
        """Log-probabilities of tickets that stage 0 left open, and after how many layers each was decided.

        One packed pass; a batch that does not fit into memory is halved, and only that batch.

        Args:
            tickets: Token ids of each ticket, without prompt, longest first.
            texts: Of the same tickets.

        Returns:
            float32 ``(tickets, labels)``, and a depth a ticket.

        Raises:
            ScoringError: A score is not finite.
        """
        try:
            log_probs, stage_of = self._score(tickets, texts)
            return log_probs, self._depths[stage_of].tolist()
        except (RuntimeError, MemoryError) as error:
            if len(tickets) == 1 or not is_out_of_memory(error):
                raise
        half = len(tickets) // 2
        log.warning("Out of memory with %d tickets in a pass: halved", len(tickets))
        first, second = self.score(tickets[:half], texts[:half]), self.score(tickets[half:], texts[half:])
        return np.concatenate([first[0], second[0]]), first[1] + second[1]

    def _score(self, tickets: Sequence[np.ndarray], texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        spec, prefix = self._engine.spec, self._engine.prefix
        front = () if prefix.length else spec.prompt.prefix_ids
        suffixes = [np.concatenate([front, ids, spec.prompt.ending_ids]).astype(np.int64) for ids in tickets]
        batch = Batch(np.concatenate(suffixes), np.array([len(ids) for ids in suffixes], dtype=np.int64))
        count = np.array([len(ids) for ids in tickets], dtype=np.int64)
        lexical = lexical_features(texts, self.head.lexicon)
        torch.set_num_threads(spec.threads)
        with torch.inference_mode():
            return staged_pass(
                self._model, batch, (np.full_like(count, len(front)), count), prefix=prefix, lexical=lexical
            )

    def reference(self, ids: np.ndarray, text: str, depth: int | None = None) -> tuple[np.ndarray, int]:
        """The slow answer for one ticket: whole prompt, stock model, every hidden state, then the head.

        Rounding may decide whether a confidence just reaches a stage's threshold. Where the stage that the run
        used is the reference's own up to the engine's tolerance, the answer is that stage's.

        Args:
            ids: Of the ticket, without prompt.
            text: Of the ticket.
            depth: After how many layers the run decided it, if it did.

        Returns:
            float32 ``(labels,)``, natural log, and after how many layers the reference decides.
        """
        lexical = lexical_features([text], self.head.lexicon)
        by_text = stage_log_probs(self.head, 0, lexical, {})
        if depth in (0, None) and is_decided(self.head, 0, by_text)[0]:
            return by_text[0], 0
        made = self._engine.own_features(ids, tuple({block.depth for block in self.head.blocks}))
        hidden = {block: getattr(made[block.depth], block.pooling) for block in self.head.blocks}
        stages = [stage_log_probs(self.head, index, lexical, hidden) for index in range(len(self.head.stages))]
        decided = next(i for i, log_probs in enumerate(stages) if is_decided(self.head, i, log_probs)[0])
        used = decided if depth is None else int(np.flatnonzero(self._depths == depth)[0])
        earlier = min(used, decided)
        confidence = float(np.exp(stages[earlier].max()))
        allowed = (
            self._tolerance if self._depths[earlier] else TOLERANCE["float32"]
        )  # words alone are not rounded to 16 bits
        if abs(confidence - self.head.stages[earlier].threshold) <= allowed * confidence:
            decided = used
        return stages[decided][0], int(self._depths[decided])


_scorers: dict[tuple[str, int], LabelScorer | HeadScorer] = {}
_lock = threading.Lock()


def load_scorer(folder: Path) -> LabelScorer | HeadScorer:
    """What labels the tickets of a run's folder, made once a process.

    Raises:
        ModelError: The weights cannot be loaded, or the execution is not exact for this model.
        HeadError: The head is not the one that the run began with.
    """
    spec, engine = read_spec(folder), load_engine(folder)
    key = (spec.score_key, id(engine))
    with _lock:
        if key not in _scorers:
            made = HeadScorer(engine, load_head(spec.head, spec.head_hash)) if spec.head else LabelScorer(engine)
            _scorers.clear()
            _scorers[key] = made
        return _scorers[key]


def float32_scorer(folder: Path) -> LabelScorer | HeadScorer:
    """The same scorer on float32 weights, for the spot check. Not kept; the run's own engine is let go first.

    Raises:
        ModelError: The weights cannot be loaded.
        HeadError: The head is not the one that the run began with.
    """
    with _lock:
        _scorers.clear()
    forget_engine()
    spec = read_spec(folder)
    weights = load_weights(Path(spec.model_folder), "float32")
    if not spec.head:
        return LabelScorer(Engine(replace(spec, dtype="float32", execution="sequential", prefix_cache=False), weights))
    engine = Engine(replace(spec, dtype="float32", prefix_cache=False), weights)
    return HeadScorer(engine, load_head(spec.head, spec.head_hash), spec.tolerance)
