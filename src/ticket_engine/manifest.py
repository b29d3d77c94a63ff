"""What a published run says about itself, in types that JSON keeps."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ticket_engine.engine_spec import EngineSpec, read_spec
from ticket_engine.head_files import load_head
from ticket_engine.settings import RunSettings

PACKAGES = (
    "ticket-engine",
    "torch",
    "transformers",
    "tokenizers",
    "polars",
    "pyarrow",
    "prefect",
    "great-expectations",
)


def make_manifest(settings: RunSettings, folder: Path, results: list[dict], seconds: dict[str, float]) -> dict:
    """The manifest of a run, without the files' hashes that `publish.write_manifest` adds.

    Args:
        settings: The run's settings, resolved.
        folder: The working folder, with its engine spec.
        results: Of reading, tokenizing, planning, gathering, the spot check, and the two contracts.
        seconds: Wall time by stage.
    """
    rows, tokens, plan, counts, checked, incoming, outgoing = results
    spec = read_spec(folder)
    scored = plan["distinct"] - plan["stored"] - plan["by_text"]
    return {
        "run_date": settings.run_date,
        "rows": {
            "input": rows["rows"],
            "predictions": counts["predictions"],
            "quarantine": rows["rows"] - counts["predictions"],
            "truncated": tokens["truncated"],
            "read_quarantine_reasons": rows["reasons"],
        },
        "labels": counts["label_counts"],
        "model": {"name": spec.model, "sha256": spec.model_hash},
        "prompt_sha256": spec.prompt.content_hash,
        "labels_sha256": spec.labels_hash,
        "score_key": spec.score_key,
        "head": _head(spec, counts) if spec.head else None,
        "review": {key: counts[key] for key in ("needs_review", "review_threshold", "review_words")},
        "execution": spec.execution,
        "execution_reason": spec.execution_reason,
        "prefix_cache": spec.prefix_cache,
        "prefix_tokens": len(spec.prompt.prefix_ids),
        "dtype": spec.dtype,
        "threads": spec.threads,
        "workers": spec.workers,
        "token_budget": spec.token_budget,
        "probe": spec.probe,
        "ticket_tokens": tokens,
        "plan": plan,
        "seconds": seconds | {"total": round(sum(seconds.values()), 3)},
        "tickets_per_second": round(scored / seconds["classify"], 3) if scored and "classify" in seconds else None,
        "spot_check": checked,
        "contracts": {"tickets": incoming, "predictions": outgoing},
        "settings": settings.model_dump(mode="json"),
        "versions": {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()},
    }


def _head(spec: EngineSpec, counts: dict) -> dict:
    """Which head decided, how many tickets it decided after how many layers, and what that is of full depth."""
    layers = load_head(spec.head, spec.head_hash).report["layers"]
    run = sum(int(depth) * count for depth, count in counts["stage_counts"].items())
    return {
        "folder": spec.head,
        "sha256": spec.head_hash,
        "layers": layers,
        "tickets_by_layers": counts["stage_counts"],
        "share_of_full_depth": run / (layers * max(1, counts["predictions"])),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
