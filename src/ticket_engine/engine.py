"""The loaded model of a run: made once a process from its spec, shared by all buckets."""

import copy
import logging
import math
import threading
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ticket_engine import fused, last_layer, layer_walk, memory
from ticket_engine.engine_spec import STATE_TOLERANCE, EngineSpec, read_spec
from ticket_engine.errors import ModelError, ScoringError
from ticket_engine.features import Features, collect_features, distance_of_states, own_features
from ticket_engine.label_trie import LabelTrie, build_trie
from ticket_engine.models import load_weights
from ticket_engine.packed_trial import attention_view
from ticket_engine.reference import own_scores, reference_scores
from ticket_engine.scoring import Batch, PrefixCache, compute_prefix, label_scores, packed_hidden, padded_hidden

_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "not enough memory")

log = logging.getLogger(__name__)


class Engine:
    """A model in memory with the shared prefix's keys and values. Safe to use from several threads.

    Nothing in it changes after it is made. The stock model and the packed view share their weights.
    """

    def __init__(self, spec: EngineSpec, model: PreTrainedModel) -> None:
        self.spec = spec
        self.trie: LabelTrie = build_trie(spec.prompt.label_ids)
        self.stock = model
        self.view = packed_view(model) if spec.execution == "packed" else None
        with torch.inference_mode():
            self.prefix: PrefixCache = compute_prefix(model, spec.prompt.prefix_ids if spec.prefix_cache else ())

    def with_spec(self, spec: EngineSpec) -> "Engine":
        """The same weights, views and prefix under another spec of the same score key."""
        other = copy.copy(self)
        other.spec = spec
        return other

    def score(self, tickets: list[np.ndarray]) -> np.ndarray:
        """Log-probability of each label for each ticket, float32 ``(tickets, labels)``.

        A batch that does not fit into memory is halved, and only that batch.

        Args:
            tickets: Token ids of each ticket, without prompt, longest first.

        Raises:
            ScoringError: A score is not finite.
        """
        if self.spec.execution == "sequential":
            return np.stack([self.reference(ids) for ids in tickets])
        try:
            return self._score(tickets).numpy()
        except (RuntimeError, MemoryError) as error:
            if len(tickets) == 1 or not is_out_of_memory(error):
                raise
        half = len(tickets) // 2
        log.warning("Out of memory with %d tickets in a pass: halved", len(tickets))
        return np.concatenate([self.score(tickets[:half]), self.score(tickets[half:])])

    def _batch(self, tickets: list[np.ndarray]) -> Batch:
        front = [] if self.prefix.length else [np.asarray(self.spec.prompt.prefix_ids, dtype=np.int64)]
        ending = np.asarray(self.spec.prompt.ending_ids, dtype=np.int64)
        suffixes = [np.concatenate([*front, ids, ending]) for ids in tickets]
        return Batch(np.concatenate(suffixes), np.array([len(ids) for ids in suffixes], dtype=np.int64))

    def features(self, tickets: list[np.ndarray], depths: tuple[int, ...]) -> list[Features]:
        """Hidden states of tickets after each of ``depths`` layers (ascending), no deeper than the last.

        Args:
            tickets: Token ids of each ticket, without prompt, longest first.
            depths: Numbers of layers, from 1 to all; all includes the final norm.

        Raises:
            ModelError: The execution is not packed.
        """
        if self.view is None:
            raise ModelError(f"Hidden states need execution packed; this model runs {self.spec.execution}.")
        batch = self._batch(tickets)
        count = np.array([len(ids) for ids in tickets], dtype=np.int64)
        first = np.full(len(tickets), 0 if self.prefix.length else len(self.spec.prompt.prefix_ids), dtype=np.int64)
        torch.set_num_threads(self.spec.threads)
        with torch.inference_mode():
            return collect_features(self.view, batch, (first, count), depths, self.prefix)

    def own_features(self, ids: np.ndarray, depths: tuple[int, ...]) -> dict[int, Features]:
        """The same of one ticket from the stock model's own hidden states over the whole prompt; rows of 1."""
        prompt = self.spec.prompt
        whole = [*prompt.prefix_ids, *np.asarray(ids).tolist(), *prompt.ending_ids]
        with torch.inference_mode():
            return own_features(
                self.stock, whole, slice(len(prompt.prefix_ids), len(prompt.prefix_ids) + len(ids)), depths
            )

    def check_features(self, depths: tuple[int, ...]) -> None:
        """Make sure that hidden states at these depths are the model's own.

        Raises:
            ModelError: They are not, or cannot be read.
        """
        tickets = _trial_tickets(self.spec)
        try:
            fast = self.features(tickets, depths)
        except (TypeError, RuntimeError, IndexError, AttributeError) as error:
            raise ModelError(
                f"Hidden states of this model cannot be read ({type(error).__name__}): heads do not work with it. "
                "Leave out the head, or choose another model."
            ) from error
        alone = [self.own_features(ids, depths) for ids in tickets]
        slow = [
            Features(*(np.concatenate([getattr(one[depth], name) for one in alone]) for name in ("last", "mean")))
            for depth in depths
        ]
        distance, allowed = distance_of_states(fast, slow), STATE_TOLERANCE[self.spec.dtype]
        if not distance <= allowed:
            raise ModelError(
                f"Hidden states differ from this model's own by {distance:.3g} of their length; allowed: {allowed:.3g}. "
                "Heads do not work with it: leave out the head, or choose another model."
            )

    def _score(self, tickets: list[np.ndarray]) -> Tensor:
        batch = self._batch(tickets)
        torch.set_num_threads(self.spec.threads)
        with torch.inference_mode():
            if self.view is not None:
                last, nodes = packed_hidden(self.view, batch, self.prefix, self.trie)
            else:
                last, nodes = padded_hidden(self.stock, batch, self.prefix, self.trie)
            return label_scores(self.stock, last, nodes, self.trie)

    def reference(self, ids: np.ndarray) -> np.ndarray:
        """The slow scorer's answer for one ticket, float32 ``(labels,)``."""
        prompt = self.spec.prompt
        whole = [*prompt.prefix_ids, *np.asarray(ids).tolist(), *prompt.ending_ids]
        torch.set_num_threads(self.spec.threads)
        with torch.inference_mode():
            return reference_scores(self.stock, whole, self.trie).numpy()

    def distance_to_own_logits(self) -> float:
        """Largest difference in probability between the reference and the model's own logits on a short prompt."""
        prompt = self.spec.prompt
        short = [*prompt.prefix_ids[:16], *prompt.ending_ids]
        with torch.inference_mode():
            ours = reference_scores(self.stock, short, self.trie)
            own = own_scores(self.stock, short, prompt.label_ids)
        return float((ours.exp() - own.exp()).abs().max())


def packed_view(model: PreTrainedModel) -> PreTrainedModel:
    """A second set of modules over the same weights that runs packed rows, its element-wise work by `kernels`."""
    view = attention_view(model)
    fused.fuse(view)
    last_layer.finish_needed_rows_only(view.get_decoder())
    layer_walk.watch_layers(view)
    return view


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in _OUT_OF_MEMORY)


_engines: dict[tuple[str, int], Engine] = {}
_lock = threading.Lock()


def load_engine(folder: Path) -> Engine:
    """The engine of a run's folder, loaded once a process.

    The reference is compared with the model's own logits first, packed and padded passes with the reference.

    Raises:
        ModelError: The weights cannot be loaded, or the execution is not exact for this model.
    """
    spec = read_spec(folder)
    key = (spec.score_key, spec.threads)
    with _lock:
        if key not in _engines:
            torch.set_num_threads(spec.threads)
            engine = Engine(spec, load_weights(Path(spec.model_folder), spec.dtype))
            memory.keep_freed_memory()
            _check_exact(engine)
            _engines.clear()
            _engines[key] = engine
        kept = _engines[key]
        if kept.spec != spec:  # of an earlier run in this process, with another budget or name for the same scores
            kept = _engines[key] = kept.with_spec(spec)
        return kept


def forget_engine() -> None:
    """Let go of the engine that is kept, so that its weights leave memory when its last user is done."""
    with _lock:
        _engines.clear()


def _check_exact(engine: Engine) -> None:
    spec = engine.spec
    allowed = math.expm1(spec.tolerance)  # what the tolerance in log-probability is at most in probability
    distance = engine.distance_to_own_logits()
    if distance > allowed:
        raise ModelError(
            f"Label scores differ from this model's own by {distance:.3g} in probability; allowed: {allowed:.3g}. "
            "Its output is made in a way that is not known here: choose another model."
        )
    if spec.execution == "sequential":
        return
    tickets = _trial_tickets(spec)
    try:
        fast = engine.score(tickets)
    except ScoringError:
        raise
    except (TypeError, RuntimeError, IndexError, AttributeError) as error:
        raise ModelError(
            f"Execution {spec.execution} does not work with this model ({type(error).__name__}). "
            "Use --execution padded or sequential."
        ) from error
    slow = np.stack([engine.reference(ids) for ids in tickets])
    distance = float(np.abs(np.exp(fast) - np.exp(slow)).max())
    if distance > allowed:
        raise ModelError(
            f"Execution {spec.execution} differs from the reference by {distance:.3g} in probability for this model; "
            f"allowed: {allowed:.3g}. Use --execution padded or sequential."
        )


def _trial_tickets(spec: EngineSpec) -> list[np.ndarray]:
    """Three short tickets made of the prompt's tokens, two of them of one length."""
    vocabulary = np.array(spec.prompt.prefix_ids, dtype=np.int64)
    return [np.resize(np.roll(vocabulary, shift), length) for shift, length in ((0, 23), (3, 23), (5, 2))]
