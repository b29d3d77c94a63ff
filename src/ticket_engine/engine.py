"""The loaded model of a run: made once a process from a small spec, shared by all buckets."""

import copy
import hashlib
import json
import logging
import math
import threading
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ticket_engine import attention, fused, last_layer, memory
from ticket_engine.errors import ModelError, ScoringError, SettingsError
from ticket_engine.features import Features, collect_features, decoder_segment
from ticket_engine.label_trie import LabelTrie, build_trie
from ticket_engine.labels import read_labels
from ticket_engine.models import find_model, hash_model, load_config, load_tokenizer, load_weights
from ticket_engine.probe import choose_speed
from ticket_engine.prompts import Prompt, build_prompt
from ticket_engine.reference import own_scores, reference_scores
from ticket_engine.scoring import Batch, PrefixCache, compute_prefix, label_scores, packed_hidden, padded_hidden
from ticket_engine.settings import RunSettings

SPEC_FILE = "engine.json"
TOKENIZER_FILE = "tokenizer.json"
SCORE_VERSION = 2  # raise when scores change for the same model, prompt and ticket
DEFAULT_TOKEN_BUDGET = 2048
NO_BUDGET = 2**31  # fixed batches are cut by a budget only if the user names one
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25, "float16": 0.05}
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "not enough memory")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything that decides a score, and how the machine is used. Small; kept as ``engine.json``.

    Attributes:
        model: As the user named it.
        model_folder: Where its files are.
        model_hash: SHA-256 over its files.
        labels: Class ids in order.
        labels_hash: SHA-256 over names, descriptions and instruction.
        prompt: Token ids of everything but the tickets.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        threads: Processor threads of one pass.
        workers: Passes at once.
        execution: ``packed``, ``padded`` or ``sequential``.
        prefix_cache: Whether the prompt prefix is computed once and shared.
        max_ticket_tokens: Longest ticket; longer ones are cut.
        truncate: ``end`` or ``middle``.
        token_budget: Most token positions of a pass.
        probe: What the probe measured, for the manifest.
    """

    model: str
    model_folder: str
    model_hash: str
    labels: tuple[str, ...]
    labels_hash: str
    prompt: Prompt
    dtype: str
    threads: int
    workers: int
    execution: str
    prefix_cache: bool
    max_ticket_tokens: int
    truncate: str
    token_budget: int
    probe: dict

    @property
    def score_key(self) -> str:
        """Hash of all that a ticket's scores depend on besides its token ids, hexadecimal."""
        parts = [SCORE_VERSION, self.model_hash, self.prompt.content_hash, list(self.labels), self.dtype]
        parts += [self.execution, self.prefix_cache]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def extra_tokens(self) -> int:
        """Positions of a pass that every ticket has besides its own tokens."""
        front = 0 if self.prefix_cache else len(self.prompt.prefix_ids)
        return front + len(self.prompt.ending_ids) + build_trie(self.prompt.label_ids).nodes

    @property
    def tolerance(self) -> float:
        """Most by which rounding may move the log-probability of a likely label, natural log.

        In float32 it holds for every label. In 16-bit formats it holds for labels of probability 0.25 and
        more, which are those that can be chosen; unlikely labels move further (measured on 24 real tickets
        in bfloat16: by up to 0.70), though hardly in probability.
        """
        return TOLERANCE[self.dtype]


def prepare_engine(settings: RunSettings, folder: Path) -> EngineSpec:
    """The spec of a run, written to ``folder`` with the tokenizer beside it. Loads no weights.

    Raises:
        ModelError: The model cannot be found, or its prompt cannot be built.
        LabelsError: The labels file is not usable.
        SettingsError: Prompt and longest ticket do not fit the model's positions.
    """
    labels = read_labels(settings.labels)
    model_folder = find_model(settings.model)
    config = load_config(model_folder)
    tokenizer = load_tokenizer(model_folder)
    prompt = build_prompt(tokenizer, labels)
    _check_positions(config, prompt, settings.max_ticket_tokens)
    choice = choose_speed(
        config.hidden_size,
        getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        dtype=settings.dtype,
        threads=settings.threads,
        workers=settings.workers,
    )
    spec = EngineSpec(
        model=settings.model,
        model_folder=str(model_folder),
        model_hash=hash_model(model_folder),
        labels=labels.names,
        labels_hash=labels.content_hash,
        prompt=prompt,
        dtype=choice.dtype,
        threads=choice.threads,
        workers=choice.workers,
        execution=settings.execution,
        prefix_cache=settings.prefix_cache,
        max_ticket_tokens=settings.max_ticket_tokens,
        truncate=settings.truncate,
        token_budget=settings.token_budget or (NO_BUDGET if settings.batch_size else DEFAULT_TOKEN_BUDGET),
        probe=choice.as_dict(),
    )
    spec = replace(spec, execution=_choose_execution(config, spec))
    spec = replace(spec, prefix_cache=_can_share_prefix(config, spec))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TOKENIZER_FILE).write_text(tokenizer.backend_tokenizer.to_str(), encoding="utf-8")
    (folder / SPEC_FILE).write_text(json.dumps(asdict(spec)), encoding="utf-8")
    return spec


def read_spec(folder: Path) -> EngineSpec:
    """The spec that `prepare_engine` wrote."""
    fields = json.loads((folder / SPEC_FILE).read_text(encoding="utf-8"))
    prompt = {key: _tuples(value) for key, value in fields.pop("prompt").items()}
    return EngineSpec(**fields | {"prompt": Prompt(**prompt), "labels": tuple(fields["labels"])})


def _tuples(value: object) -> object:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _check_positions(config, prompt: Prompt, max_ticket_tokens: int) -> None:
    most = getattr(config, "max_position_embeddings", None)
    needed = len(prompt.prefix_ids) + len(prompt.ending_ids) + max(map(len, prompt.label_ids))
    if most is not None and needed + max_ticket_tokens > most:
        raise SettingsError(
            f"The prompt takes {needed} tokens and a ticket up to {max_ticket_tokens}, but the model has {most} "
            f"positions. Set max_ticket_tokens to at most {max(most - needed, 0)}, or shorten the label descriptions."
        )


def _choose_execution(config, spec: EngineSpec) -> str:
    """The execution asked for, or the fastest that is exact for the model's kind of attention."""
    longest = len(spec.prompt.prefix_ids) + spec.max_ticket_tokens + len(spec.prompt.ending_ids) + 16
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    windowed = window is not None and window < longest and (not kinds or "sliding_attention" in kinds)
    other = kinds - {"full_attention", "sliding_attention"}
    if other or getattr(config, "is_encoder_decoder", False) or not hasattr(config, "num_attention_heads"):
        best, reason = "sequential", f"its layers ({', '.join(sorted(other)) or 'unknown'}) are not plain attention"
    elif windowed or not _has_shared_attention(config):
        best = "padded" if all(len(ids) == 1 for ids in spec.prompt.label_ids) else "sequential"
        reason = "its attention is its own and not one of transformers' shared functions"
        if windowed:
            reason = f"its sliding window of {window} tokens is shorter than the longest prompt of {longest}"
    else:
        best, reason = "packed", ""
    order = ("packed", "padded", "sequential")
    if spec.execution == "auto":
        if reason:
            log.info("Execution %s instead of packed: %s", best, reason)
        return best
    if order.index(spec.execution) < order.index(best):
        raise ModelError(f"Execution {spec.execution} is not exact for this model: {reason}. Use auto or {best}.")
    return spec.execution


def _has_shared_attention(config) -> bool:
    """Whether the model's attention is looked up in transformers' registry, where ours can take its place."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return getattr(model_class, "_supports_attention_backend", True)


def _can_share_prefix(config, spec: EngineSpec) -> bool:
    """Whether the prefix is computed once: not one by one, and not where a padded cache would slide."""
    windowed = getattr(config, "sliding_window", None) is not None
    return spec.prefix_cache and (spec.execution == "packed" or (spec.execution == "padded" and not windowed))


class Engine:
    """A model in memory with the shared prefix's keys and values. Safe to use from several threads.

    Nothing in it changes after it is made. The stock model and the packed view share their weights.
    """

    def __init__(self, spec: EngineSpec, model: PreTrainedModel) -> None:
        self.spec = spec
        self.trie: LabelTrie = build_trie(spec.prompt.label_ids)
        self._stock = model
        self._view = packed_view(model) if spec.execution == "packed" else None
        with torch.inference_mode():
            self.prefix: PrefixCache = compute_prefix(model, spec.prompt.prefix_ids if spec.prefix_cache else ())

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
        if self._view is None:
            raise ModelError(f"Hidden states need execution packed; this model runs {self.spec.execution}.")
        batch = self._batch(tickets)
        count = np.array([len(ids) for ids in tickets], dtype=np.int64)
        first = np.full(len(tickets), 0 if self.prefix.length else len(self.spec.prompt.prefix_ids), dtype=np.int64)
        segments = [decoder_segment(self._view, start, stop) for start, stop in pairwise((0, *depths))]
        torch.set_num_threads(self.spec.threads)
        with torch.inference_mode():
            return collect_features(segments, batch, self.prefix, (first, count))

    def _score(self, tickets: list[np.ndarray]) -> Tensor:
        batch = self._batch(tickets)
        torch.set_num_threads(self.spec.threads)
        with torch.inference_mode():
            if self._view is not None:
                last, nodes = packed_hidden(self._view, batch, self.prefix, self.trie)
            else:
                last, nodes = padded_hidden(self._stock, batch, self.prefix, self.trie)
            return label_scores(self._stock, last, nodes, self.trie)

    def reference(self, ids: np.ndarray) -> np.ndarray:
        """The slow scorer's answer for one ticket, float32 ``(labels,)``."""
        prompt = self.spec.prompt
        whole = [*prompt.prefix_ids, *np.asarray(ids).tolist(), *prompt.ending_ids]
        torch.set_num_threads(self.spec.threads)
        with torch.inference_mode():
            return reference_scores(self._stock, whole, self.trie).numpy()

    def distance_to_own_logits(self) -> float:
        """Largest difference in probability between the reference and the model's own logits on a short prompt."""
        prompt = self.spec.prompt
        short = [*prompt.prefix_ids[:16], *prompt.ending_ids]
        with torch.inference_mode():
            ours = reference_scores(self._stock, short, self.trie)
            own = own_scores(self._stock, short, prompt.label_ids)
        return float((ours.exp() - own.exp()).abs().max())


def packed_view(model: PreTrainedModel) -> PreTrainedModel:
    """A second set of modules over the same weights whose attention is `attention.PACKED`."""
    attention.register()
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    view = copy.deepcopy(model, shared)
    view.set_attn_implementation(attention.PACKED)
    fused.fuse(view)
    last_layer.finish_needed_rows_only(view.get_decoder())
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
        return _engines[key]


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
    vocabulary = np.array(spec.prompt.prefix_ids, dtype=np.int64)
    tickets = [np.resize(np.roll(vocabulary, shift), length) for shift, length in ((0, 23), (3, 23), (5, 2))]
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
