"""Folders that this program made, told by a mark inside: nothing else is ever replaced or removed.

The mark is a small hidden file with the project's name, the kind of folder and the format of what is in it.
"""

import json
import shutil
from pathlib import Path
from typing import Final

from ticket_engine.errors import OutputError

MARK_FILE: Final = ".classify-tickets.json"
RUN, HEAD, EVALUATION, SCORES = "run", "head", "evaluation", "scores"
_PROJECT, _FORMAT = "classify-tickets", 1


def mark(folder: Path, kind: str) -> None:
    """Say in a folder that this program made it and may replace or remove it."""
    if is_marked(folder, kind):
        return
    text = json.dumps({"project": _PROJECT, "kind": kind, "format": _FORMAT})
    (folder / MARK_FILE).write_text(text + "\n", encoding="utf-8")


def is_marked(folder: Path, kind: str) -> bool:
    """Whether it is a folder, not a link, with the mark of this kind.

    Raises:
        OSError: The mark is there and cannot be read.
    """
    try:
        content = json.loads((folder / MARK_FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return False
    found = isinstance(content, dict) and (content.get("project"), content.get("kind"))
    return found == (_PROJECT, kind) and not folder.is_symlink()


def check_ours(folder: Path, kind: str) -> None:
    """Make sure that nothing is at this place, an empty folder, or a marked one.

    A folder that holds nothing but a mark, whole or not, is empty: its maker was killed while it made it.

    Raises:
        OutputError: Something else is there.
    """
    is_empty = folder.is_dir() and all(path.name == MARK_FILE for path in folder.iterdir())
    if folder.is_symlink() or (folder.exists() and not is_empty and not is_marked(folder, kind)):
        raise OutputError(
            f"{folder} exists and was not made by classify-tickets as a folder of this kind (it holds no {MARK_FILE} "
            f"that says so). Name another folder, or move it away."
        )


def remove_ours(folder: Path, kind: str) -> None:
    """Remove a folder if it is there.

    Raises:
        OutputError: It is not ours.
    """
    check_ours(folder, kind)
    shutil.rmtree(folder, ignore_errors=True)
