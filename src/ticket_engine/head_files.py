"""A head on disk: ``head.safetensors`` with the numbers, ``head.json`` with what they mean and their hash.

No ticket text and no row of the fitting table is kept: weights, hash bins, means and deviations, the
confidences of held-out rows without their ids, and a hash of each labelled text, by which an evaluation
tells whether it asks about tickets that the head has seen.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ticket_engine.errors import HeadError, OutputError
from ticket_engine.heads import Block, Head, HeadIdentity, Scaling, Stage
from ticket_engine.lexical import Lexicon
from ticket_engine.ownership import HEAD, check_ours, mark, remove_ours

HEAD_VERSION = 2
ARRAYS_FILE, TEXT_FILE = "head.safetensors", "head.json"


@contextmanager
def claimed_head(output: Path) -> Iterator[Path]:
    """An empty working folder beside a head folder, while no other fit may write there; removed at the end.

    Raises:
        OutputError: Another fit is writing there, or the place is not a head's or not writable.
    """
    if output.name in ("", ".", ".."):
        raise OutputError(f"{output} cannot be a head folder. Name a folder that this fit may replace.")
    output = output.resolve() if output.is_dir() else output
    check_ours(output, HEAD)
    folder = output.parent / f".{output.name}.work"
    with ExitStack() as stack:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(output.parent / f".{output.name}.lock", timeout=0))
            remove_ours(folder, HEAD)
            folder.mkdir()
            mark(folder, HEAD)
        except Timeout:
            raise OutputError(f"Another fit is writing to {output}. Wait for it, or name another folder.") from None
        except OSError as error:
            raise OutputError(f"{output} cannot be written: {error.strerror}.") from error
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


def save_head(head: Head, folder: Path) -> None:
    """Write a head. The description carries the hash of the numbers: `load_head` refuses a half-written pair.

    Raises:
        OutputError: The folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark(folder, HEAD)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".head-") as staged:
            save_file(_arrays(head), Path(staged) / ARRAYS_FILE)
            description = _description(head, _hash_file(Path(staged) / ARRAYS_FILE))
            (Path(staged) / TEXT_FILE).write_text(json.dumps(description, indent=2, ensure_ascii=False) + "\n", "utf-8")
            for name in (ARRAYS_FILE, TEXT_FILE):
                (Path(staged) / name).chmod(0o644)
                os.replace(Path(staged) / name, folder / name)
    except OSError as error:
        raise OutputError(
            f"The head cannot be written to {folder}: {error.strerror or type(error).__name__}."
        ) from error


def put_head(staged: Path, output: Path) -> None:
    """Move a staged head into its folder, checked as it is read back.

    Raises:
        HeadError: What was staged is not whole.
        OutputError: The folder is not a head's.
    """
    load_head(staged)
    check_ours(output.resolve(), HEAD)
    output.mkdir(parents=True, exist_ok=True)
    mark(output, HEAD)
    for name in (ARRAYS_FILE, TEXT_FILE):
        shutil.move(staged / name, output / name)


def load_head(folder: str | Path, expected_hash: str | None = None) -> Head:
    """The head of a folder.

    Args:
        folder: Written by `save_head`.
        expected_hash: From `head_hash`, where the head must still be the one seen before.

    Raises:
        HeadError: Missing, of another version, or its numbers are not those that were written.
    """
    folder = Path(folder)
    if expected_hash is not None and head_hash(folder) != expected_hash:
        raise HeadError(f"The head in {folder} was replaced while the run used it. Run again.")
    try:
        description = json.loads((folder / TEXT_FILE).read_text("utf-8"))
        found = _hash_file(folder / ARRAYS_FILE)
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        raise HeadError(
            f"There is no fitted head in {folder}: {missing} is missing. Make one with python -m flows.fit_labels."
        ) from None
    except (OSError, ValueError) as error:
        raise HeadError(f"The head in {folder} cannot be read ({type(error).__name__}). Fit it again.") from error
    version = description.get("version") if isinstance(description, dict) else None
    if version != HEAD_VERSION:
        raise HeadError(f"The head in {folder} has version {version}, allowed is {HEAD_VERSION}. Fit it again.")
    try:
        if found != description["arrays_hash"]:
            raise HeadError(
                f"The numbers of the head in {folder} are not those that were written (hash {found[:12]}, "
                f"expected {description['arrays_hash'][:12]}). Copy the folder whole, or fit it again."
            )
        return _head(description, load_file(folder / ARRAYS_FILE))
    except (KeyError, TypeError, SafetensorError) as error:
        raise HeadError(f"The head in {folder} is damaged ({type(error).__name__}). Fit it again.") from error


def head_hash(folder: str | Path) -> str:
    """SHA-256 of a head's description, which carries the hash of its numbers; for manifests and store keys.

    Raises:
        HeadError: There is none.
    """
    try:
        return _hash_file(Path(folder) / TEXT_FILE)
    except OSError:
        raise HeadError(
            f"There is no fitted head in {folder}: {TEXT_FILE} is missing. Make one with python -m flows.fit_labels."
        ) from None


def _arrays(head: Head) -> dict[str, np.ndarray]:
    arrays = {
        "lexicon.word_bins": head.lexicon.word_bins,
        "lexicon.word_idf": head.lexicon.word_idf,
        "lexicon.character_bins": head.lexicon.character_bins,
        "lexicon.character_idf": head.lexicon.character_idf,
        "held_out.confidence": head.held_out_confidence.astype(np.float32),
        "held_out.correct": head.held_out_correct.astype(np.uint8),
        "fitted.texts": head.fitted_texts.astype(np.uint64),
    }
    for block, scaling in head.scalings.items():
        arrays[f"scaling.{block.key}.mean"] = scaling.mean
        arrays[f"scaling.{block.key}.factor"] = scaling.factor
    for index, stage in enumerate(head.stages):
        arrays[f"stage.{index}.lexical"] = stage.lexical_weights
        arrays[f"stage.{index}.bias"] = stage.bias
        for block, weights in stage.hidden_weights.items():
            arrays[f"stage.{index}.{block.key}"] = weights
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def _description(head: Head, arrays_hash: str) -> dict:
    return {
        "version": HEAD_VERSION,
        "arrays_hash": arrays_hash,
        "labels": list(head.labels),
        "identity": asdict(head.identity),
        "stages": [
            {
                "depth": stage.depth,
                "blocks": [[block.depth, block.pooling] for block in stage.hidden_weights],
                "temperature": stage.temperature,
                "threshold": stage.threshold,
            }
            for stage in head.stages
        ],
        "report": dict(head.report),
    }


def _head(description: dict, arrays: dict[str, np.ndarray]) -> Head:
    stages, scalings = [], {}
    for index, fields in enumerate(description["stages"]):
        blocks = [Block(depth, pooling) for depth, pooling in fields["blocks"]]
        for block in blocks:
            scalings[block] = Scaling(arrays[f"scaling.{block.key}.mean"], arrays[f"scaling.{block.key}.factor"])
        stages.append(
            Stage(
                depth=fields["depth"],
                lexical_weights=arrays[f"stage.{index}.lexical"],
                hidden_weights={block: arrays[f"stage.{index}.{block.key}"] for block in blocks},
                bias=arrays[f"stage.{index}.bias"],
                temperature=fields["temperature"],
                threshold=fields["threshold"],
            )
        )
    lexicon = Lexicon(
        *(arrays[f"lexicon.{name}"] for name in ("word_bins", "word_idf", "character_bins", "character_idf"))
    )
    return Head(
        labels=tuple(description["labels"]),
        identity=HeadIdentity(**description["identity"]),
        lexicon=lexicon,
        scalings=scalings,
        stages=tuple(stages),
        held_out_confidence=arrays["held_out.confidence"],
        held_out_correct=arrays["held_out.correct"].astype(bool),
        fitted_texts=arrays["fitted.texts"],
        report=description["report"],
    )


def _hash_file(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
