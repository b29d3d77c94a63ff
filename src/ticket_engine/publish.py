"""From a finished run's files to the output folder: whole or not at all.

Beside an output folder ``NAME`` lie, on the same file system::

    .NAME.lock      held while a run writes to NAME
    .NAME.work/     working folder of the run; made anew at each start
    .NAME.old/      the run before, until the next is published: readers that are inside it can finish
    NAME.refused/   staged results of the last run that validation refused

All four folders carry the mark of `ownership`; what does not is left alone. A link to a folder is followed.
"""

import ctypes
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import pyarrow.parquet as pq
from filelock import FileLock, Timeout
from polars.exceptions import PolarsError

from ticket_engine.errors import InputError, OutputError
from ticket_engine.ownership import RUN, check_ours, is_marked, mark, remove_ours
from ticket_engine.schemas import MANIFEST_FILE, PREDICTIONS_FILE, QUARANTINE_FILE
from ticket_engine.settings import RunSettings, fill_dates

DAYS_BACK = 366
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def working_folder(output: Path) -> Path:
    """Working folder of a run that publishes to ``output``."""
    return output.parent / f".{output.name}.work"


def previous_folder(output: Path) -> Path:
    """Where the run that was published before lies until the next one is."""
    return output.parent / f".{output.name}.old"


def refused_folder(output: Path) -> Path:
    """Where the results of a refused run are kept."""
    return output.parent / f"{output.name}.refused"


@contextmanager
def claimed_output(output: Path) -> Iterator[Path]:
    """An empty working folder, while no other run may write to ``output``.

    Leavings of a killed run are removed. The folder is removed at the end, whatever happens.

    Raises:
        OutputError: Another run is writing there, the place is not ours or not writable, or there is no room left.
    """
    if output.name in ("", ".", ".."):
        raise OutputError(f"{output} cannot be an output folder. Name a folder that this run may replace.")
    output = followed(output)
    folder = working_folder(output)
    with ExitStack() as stack:
        try:
            _check_replaceable(output)
            output.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(output.parent / f".{output.name}.lock", timeout=0))
            remove_ours(folder, RUN)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            folder.mkdir()
            mark(folder, RUN)
        except Timeout:
            raise OutputError(f"Another run is writing to {output}. Wait for it, or name another folder.") from None
        except OSError as error:
            if _is_no_room(error):
                raise _no_room(output) from error
            raise OutputError(f"{output} cannot be written: {error.strerror}.") from error
        try:
            yield folder
        except (OSError, PolarsError) as error:
            if not _is_no_room(error):
                raise
            raise _no_room(output) from error


def _no_room(output: Path) -> OutputError:
    return OutputError(
        f"There was no room left for {output} or its store. Nothing was published, what was there before "
        "is as it was. Make room and run again: what was scored is kept."
    )


def followed(output: Path) -> Path:
    """The folder that an output is, or that it is a link to.

    Raises:
        OutputError: A link that leads nowhere.
    """
    if not output.is_symlink():
        return output
    if not output.exists():
        raise OutputError(f"{output} is a link that leads nowhere. Make the folder that it names, or remove the link.")
    return output.resolve()


def _check_replaceable(output: Path) -> None:
    """Refuse at the start what could not be put in place after hours of work."""
    if output.exists() and _is_mount(output):
        raise OutputError(
            f"{output} is a mount point, and a mount point cannot be replaced in one step. "
            f"Name a folder inside it, such as {output / 'labels'}."
        )
    for folder in (output, previous_folder(output), refused_folder(output)):
        check_ours(folder, RUN)
    if (output / MANIFEST_FILE).exists():
        try:
            read_manifest(output)
        except InputError as error:
            raise OutputError(f"{error} It would be replaced: move {output} away, or name another folder.") from error


def _is_mount(folder: Path) -> bool:
    """Whether something is mounted there; folders of the same disk, bound, are told only by the kernel's list."""
    if folder.is_mount():
        return True
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return False
    places = {line.split()[4].decode("unicode_escape").encode("latin-1") for line in lines}
    return os.fsencode(folder.resolve()) in places


def write_manifest(staged: Path, manifest: dict) -> dict:
    """Write ``manifest.json`` into the staged folder, with hash, bytes and rows of each table; the whole of it."""
    files = {}
    for path in sorted(staged.glob("*.parquet")):
        files[path.name] = {
            "sha256": _sha256(path),
            "bytes": path.stat().st_size,
            "rows": pq.read_metadata(path).num_rows,
        }
    whole = manifest | {"files": files}
    text = json.dumps(whole, indent=2, ensure_ascii=False)
    (staged / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")
    return whole


def read_manifest(output: Path) -> dict:
    """The manifest of a published folder.

    Raises:
        InputError: The folder holds none, or it is not a run's.
    """
    try:
        manifest = json.loads((output / MANIFEST_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{output} holds no {MANIFEST_FILE}: not a published run.") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{output / MANIFEST_FILE} cannot be read: {type(error).__name__}.") from error
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
        raise InputError(f"{output / MANIFEST_FILE} does not list the files of a run.")
    return manifest


def find_earlier(settings: RunSettings) -> Path | None:
    """The published run that a run's label shares are compared with, None if there is none.

    The latest within a year before the run date where ``compare_with`` names a folder a day; else the folder
    that it names, which is the output as it stands before the run replaces it.

    Args:
        settings: Of the run, resolved.
    """
    template, day, output = settings.compare_with or settings.output, settings.day(), Path(settings.output)
    earlier = (Path(fill_dates(template, day - timedelta(days=number))) for number in range(1, DAYS_BACK + 1))
    candidates = (*(folder for folder in earlier if folder != output), Path(fill_dates(template, day)))
    return next((folder for folder in candidates if _is_run(folder)), None)


def find_damage(output: Path) -> list[str]:
    """What differs between a published folder and its manifest, a line each; empty if it is whole."""
    damage = []
    for name, expected in read_manifest(output)["files"].items():
        path = output / name
        if not path.is_file():
            damage.append(f"{name} is missing")
        elif _sha256(path) != expected.get("sha256"):
            damage.append(f"{name} was changed after it was published")
        elif pq.read_metadata(path).num_rows != expected.get("rows"):
            damage.append(f"{name} has another number of rows than its manifest says")
    for name in (PREDICTIONS_FILE, QUARANTINE_FILE):
        if not (output / name).is_file() and f"{name} is missing" not in damage:
            damage.append(f"{name} is missing")
    return damage


def publish(staged: Path, output: Path) -> None:
    """Put a complete staged folder in the place of ``output`` in one step.

    Where the kernel can, the two folders are exchanged atomically: a reader sees the old run or the new
    one. Elsewhere (not Linux, some network file systems) the old folder is moved aside first, and for
    the moment between two renames there is none. The old folder stays until the next run is published.

    Raises:
        OutputError: Something that is not ours came into the way meanwhile; nothing was touched.
    """
    output = followed(output)
    mark(staged, RUN)
    _flush(staged)
    previous = previous_folder(output)
    check_ours(output, RUN)
    remove_ours(previous, RUN)
    if not output.exists():
        staged.rename(output)
    elif _exchange(staged, output):
        staged.rename(previous)
    else:
        output.rename(previous)
        staged.rename(output)
    _flush_folder(output.parent)


def keep_refused(staged: Path, output: Path) -> Path:
    """Move a refused run's staged results to where people can look at them; that folder."""
    kept = refused_folder(followed(output))
    remove_ours(kept, RUN)
    mark(staged, RUN)
    staged.rename(kept)
    return kept


def _is_no_room(error: BaseException) -> bool:
    """Whether a disk was full, a quota used up, or a file too large for it; Polars says so in words only."""
    code = getattr(error, "errno", None)
    return code in _NO_ROOM or (code is None and any(os.strerror(number) in str(error) for number in _NO_ROOM))


def _is_run(folder: Path) -> bool:
    folder = folder.resolve()
    return is_marked(folder, RUN) and (folder / MANIFEST_FILE).is_file()


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders by `renameat2(RENAME_EXCHANGE)`; False where that is not to be had."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(second))


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as handle:
                os.fsync(handle.fileno())
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
