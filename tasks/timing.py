"""Seconds that each stage took, kept in the run's working folder until the manifest is made."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS_FOLDER = "seconds"


@contextmanager
def stage_seconds(folder: Path, stage: str) -> Iterator[None]:
    """Measure a stage's wall time and note it under its name."""
    started = time.perf_counter()
    yield
    (folder / SECONDS_FOLDER).mkdir(exist_ok=True)
    (folder / SECONDS_FOLDER / f"{stage}.json").write_text(json.dumps(time.perf_counter() - started))


def read_seconds(folder: Path) -> dict[str, float]:
    """Seconds by stage, in the order in which the stages ended."""
    paths = sorted((folder / SECONDS_FOLDER).glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    return {path.stem: round(json.loads(path.read_text()), 3) for path in paths}
