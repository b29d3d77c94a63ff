"""The spec of a run, made from its settings: model, prompt, head, number format, execution. Loads no weights."""

import json
import logging
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

from ticket_engine.engine_spec import SPEC_FILE, TOKENIZER_FILE, EngineSpec
from ticket_engine.errors import ModelError, SettingsError
from ticket_engine.head_files import head_hash, load_head
from ticket_engine.heads import check_identity
from ticket_engine.labels import keep_labels, read_labels
from ticket_engine.models import find_model, hash_model, load_config, load_tokenizer
from ticket_engine.packed_trial import is_exact_when_packed
from ticket_engine.probe import Choice, choose_speed
from ticket_engine.prompts import Prompt, build_prompt
from ticket_engine.settings import RunSettings
from ticket_engine.store import read_format, write_format

DEFAULT_TOKEN_BUDGET = 2048
LIBRARIES = ("torch", "transformers", "numba")
NO_BUDGET = 2**31  # fixed batches are cut by a budget only if the user names one

log = logging.getLogger(__name__)


def prepare_engine(settings: RunSettings, folder: Path) -> EngineSpec:
    """The spec of a run, written to ``folder`` with the tokenizer beside it. Loads no weights.

    Raises:
        ModelError: The model cannot be found, or its prompt cannot be built.
        LabelsError: The labels file is not usable.
        SettingsError: Prompt and longest ticket do not fit the model's positions.
        HeadError: The head is missing, damaged, or was fitted for something else.
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
        execution_reason="",
        prefix_cache=settings.prefix_cache,
        max_ticket_tokens=settings.max_ticket_tokens,
        truncate=settings.truncate,
        token_budget=settings.token_budget or (NO_BUDGET if settings.batch_size else DEFAULT_TOKEN_BUDGET),
        head=str(Path(settings.head).resolve()) if settings.head else None,
        head_hash=head_hash(settings.head) if settings.head else None,
        probe=choice.as_dict(),
        libraries={name: version(name) for name in LIBRARIES},
    )
    execution, reason = _choose_execution(config, spec)
    spec = replace(spec, execution=execution, execution_reason=reason)
    spec = replace(spec, prefix_cache=_can_share_prefix(config, spec))
    if settings.dtype == "auto" and settings.store:
        spec = _in_kept_format(spec, choice, Path(settings.store))
    _check_head(spec)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TOKENIZER_FILE).write_text(tokenizer.backend_tokenizer.to_str(), encoding="utf-8")
    keep_labels(labels, folder)
    (folder / SPEC_FILE).write_text(json.dumps(asdict(spec)), encoding="utf-8")
    return spec


def _in_kept_format(spec: EngineSpec, choice: Choice, store: Path) -> EngineSpec:
    """The spec in the number format of the store's earlier nights, which is noted there for the next.

    A busy night's probe would else choose another, and none of the stored scores would be found.
    """
    key = replace(spec, dtype="").score_key
    kept = choice.in_format(read_format(store, key) or choice.dtype)
    if kept.dtype != choice.dtype:
        log.info("Number format %s as in earlier nights; the probe alone would choose %s", kept.dtype, choice.dtype)
    write_format(store, key, kept.dtype)
    return replace(spec, dtype=kept.dtype, threads=kept.threads, workers=kept.workers, probe=kept.as_dict())


def _check_head(spec: EngineSpec) -> None:
    if spec.head is None:
        return
    check_identity(
        load_head(spec.head, spec.head_hash),
        model_hash=spec.model_hash,
        prompt_hash=spec.prompt.content_hash,
        labels_hash=spec.labels_hash,
    )
    if spec.execution != "packed":
        raise ModelError(f"A head needs execution packed; this run would use {spec.execution}. Leave out the head.")


def _check_positions(config, prompt: Prompt, max_ticket_tokens: int) -> None:
    most = getattr(config, "max_position_embeddings", None)
    needed = len(prompt.prefix_ids) + len(prompt.ending_ids) + max(map(len, prompt.label_ids))
    if most is not None and needed + max_ticket_tokens > most:
        raise SettingsError(
            f"The prompt takes {needed} tokens and a ticket up to {max_ticket_tokens}, but the model has {most} "
            f"positions. Set max_ticket_tokens to at most {max(most - needed, 0)}, or shorten the label descriptions."
        )


def _choose_execution(config, spec: EngineSpec) -> tuple[str, str]:
    """The execution asked for, or the fastest that is exact for the model's kind of attention, and why not packed."""
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
    elif spec.execution in ("auto", "packed") and is_exact_when_packed(config) is False:
        best = "padded" if all(len(ids) == 1 for ids in spec.prompt.label_ids) else "sequential"
        reason = "a trial in a packed row gave other hidden states than each ticket alone"
    else:
        best, reason = "packed", ""
    order = ("packed", "padded", "sequential")
    if spec.execution == "auto":
        if reason:
            log.info("Execution %s instead of packed: %s", best, reason)
        return best, reason
    if order.index(spec.execution) < order.index(best):
        raise ModelError(f"Execution {spec.execution} is not exact for this model: {reason}. Use auto or {best}.")
    return spec.execution, ""


def _has_shared_attention(config) -> bool:
    """Whether the model's attention is looked up in transformers' registry, where ours can take its place."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return getattr(model_class, "_supports_attention_backend", True)


def _can_share_prefix(config, spec: EngineSpec) -> bool:
    """Whether the prefix is computed once: not one by one, and not where a padded cache would slide."""
    windowed = getattr(config, "sliding_window", None) is not None
    return spec.prefix_cache and (spec.execution == "packed" or (spec.execution == "padded" and not windowed))
