"""Scored tickets kept between runs: ``STORE/SCORE_KEY/`` holds parts (see `parts`) of two kinds.

- Parts of buckets, ``CONTENT_KEY.parquet``, written while a run classifies; a killed run is continued from them.
- Parts of nights, ``night-CONTENT_KEY.parquet``: all that a published run used, found or new. Its buckets' parts go then.

A ticket that no run uses any more stays behind in older nights and leaves with them. Eight nights of about one size are
merged into one, each ticket once, so that the files stay few and a night's look costs what the night holds, plus a walk
over the stored keys (16 bytes a ticket), however many nights there are::

    night  night  night ... (eight)  ->  night of eight  ... (eight)  ->  night of 64

The folder of a score key carries the mark of `ownership`; nothing is removed that has no mark above it or another name
than a part's.
"""

import json
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import polars as pl
from filelock import FileLock, Timeout

from ticket_engine.errors import StoreError
from ticket_engine.ownership import SCORES, is_marked
from ticket_engine.parts import COLUMNS, SUFFIX, Part, TornError, today, unreadable, write_part, write_whole
from ticket_engine.schemas import REASON, TICKET_KEY, USED_DAY

FORMATS = "number-formats"
NIGHT = "night-"
MERGED_AT_ONCE = 8
MOST_LISTINGS = 5  # of a folder in which another run merges
_OURS = re.compile(rf"({NIGHT})?[0-9a-f]{{32}}\.parquet|[0-9a-f]{{32}}\.json|tmp\w+\.part")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredSummary:
    """What a store held for a run: tickets known, parts that gave some, parts not trusted, and rows read whole."""

    tickets: int
    parts: int
    rejected_parts: int
    read_rows: int = 0


def find_stored(store: Path, score_key: str, wanted: pl.DataFrame) -> tuple[pl.DataFrame, StoredSummary]:
    """Scores of some tickets, the latest first, each once, and what was found.

    Only the keys of a part are read, and the row groups that hold a wanted one.

    Args:
        store: The store; need not be there.
        score_key: Of the engine's spec.
        wanted: ``ticket_key``, each once; other columns are not looked at.

    Raises:
        StoreError: A part is there and could not be read.
    """
    left, found = wanted.select(TICKET_KEY), [empty_scores()]
    rejected = read = 0
    seen, parts = set(), set()
    for _ in range(MOST_LISTINGS):
        vanished = False
        for path in _newest_first(_parts(store / score_key[:32])):
            if path in seen or left.is_empty():
                continue
            seen.add(path)
            try:
                for frame in _hits(path, score_key, left):
                    read, parts = read + len(frame), parts | {path}
                    here = frame.join(left, on=TICKET_KEY, how="semi").unique(TICKET_KEY, keep="first")
                    left = left.join(here, on=TICKET_KEY, how="anti")
                    found.append(here.select(COLUMNS).cast(found[0].schema))
            except FileNotFoundError:
                vanished = True  # merged by another run: its tickets are in a newer part
            except TornError:
                rejected += 1
                log.warning("A stored part is torn or foreign and is done again: %s", path.name)
                path.unlink(missing_ok=True)
        if not vanished:
            break
    known = pl.concat(found)
    return known, StoredSummary(len(known), len(parts), rejected, read)


def empty_scores() -> pl.DataFrame:
    """A table of scores without rows."""
    types = (pl.Binary, pl.List(pl.Float32), pl.Int16, pl.String)
    return pl.DataFrame(schema=dict(zip(COLUMNS, types, strict=True)))


def keep_night(store: Path, score_key: str, scores: Iterable[pl.DataFrame], buckets: Iterable[Path]) -> None:
    """Keep all scores that a published run used as one part, in place of its buckets' parts.

    Args:
        store: The store.
        score_key: Of the engine's spec.
        scores: In the form of `parts.write_part`, each ticket once; tickets without scores are left out.
        buckets: The run's own parts, removed when the night's is written.
    """
    good = (frame.filter(frame[REASON].is_null()) for frame in scores)
    write_part(store / score_key[:32] / f"{NIGHT}{uuid4().hex}{SUFFIX}", score_key, good)
    for path in buckets:
        path.unlink(missing_ok=True)


def tidy_store(store: Path, days: int) -> int:
    """Merge nights of about one size, and delete what no run used for so many days; the number of files deleted.

    One process at a time; another that comes meanwhile has nothing to do.
    """
    if not store.is_dir():
        return 0
    try:
        with FileLock(store / ".tidy.lock", timeout=0):
            return sum(_tidy_folder(folder, days) for folder in store.iterdir() if folder.is_dir())
    except Timeout:
        return 0


def read_format(store: Path, key: str) -> str | None:
    """The number format that earlier runs of the same kind used; None if there is none.

    Args:
        store: The store.
        key: Hash of all but the format that decides a score, hexadecimal.
    """
    try:
        return json.loads((store / FORMATS / f"{key[:32]}.json").read_text(encoding="utf-8"))["dtype"]
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    except OSError as error:
        raise unreadable(store, error) from error


def write_format(store: Path, key: str, dtype: str) -> None:
    """Note the number format for later runs of the same kind; it ages like a part."""
    content = json.dumps({"dtype": dtype}).encode()
    write_whole(store / FORMATS / f"{key[:32]}.json", lambda file: file.write(content))


def _hits(path: Path, score_key: str, wanted: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Row groups of a part that hold a wanted ticket."""
    with Part(path, score_key) as part:
        for group in range(part.groups):
            if not part.keys(group).to_frame().join(wanted, on=TICKET_KEY, how="semi").is_empty():
                yield part.read(group)


def _tidy_folder(folder: Path, days: int) -> int:
    oldest, removed = today() - days, 0
    for path in _own_files(folder):
        with suppress(FileNotFoundError, TornError, StoreError):  # what cannot be read now is not judged
            if path.name.startswith(NIGHT):
                with Part(path, None) as part:
                    is_old = part.newest_day < oldest
            else:
                is_old = path.stat().st_mtime < oldest * 86400
            if is_old:
                path.unlink()
                removed += 1
    while group := _same_size(folder):
        _merge(group, oldest)
        removed += len(group) - 1
    return removed


def _same_size(folder: Path) -> list[Path]:
    """Nights to merge: those of one engine and one size, by powers of eight, latest first; empty if they are too few."""
    sizes: dict[tuple[str, int], list[tuple[int, Path]]] = {}
    for path in _own_files(folder):
        if path.name.startswith(NIGHT):
            with suppress(FileNotFoundError, TornError, StoreError), Part(path, None) as part:
                size = (part.score_key, (part.rows.bit_length() - 1) // 3)
                sizes.setdefault(size, []).append((-part.newest_day, path))
    full = next((found for found in sizes.values() if len(found) >= MERGED_AT_ONCE), [])
    return [path for _, path in sorted(full)]


def _merge(paths: list[Path], oldest: int) -> None:
    """One part of the rows of several, each ticket once as the latest has it, without those unused since ``oldest``."""
    with Part(paths[0], None) as part:
        score_key = part.score_key

    def rows() -> Iterator[pl.DataFrame]:
        seen = pl.DataFrame(schema={TICKET_KEY: pl.Binary})
        for path in paths:
            with suppress(FileNotFoundError, TornError), Part(path, score_key) as part:  # what is torn is done again
                for frame in part.frames():
                    new = frame.join(seen, on=TICKET_KEY, how="anti", maintain_order="left")
                    seen = pl.concat([seen, new.select(TICKET_KEY)])
                    yield new.filter(pl.col(USED_DAY) >= oldest)

    write_part(paths[0].parent / f"{NIGHT}{uuid4().hex}{SUFFIX}", score_key, rows())
    for path in paths:
        path.unlink(missing_ok=True)


def _own_files(folder: Path) -> list[Path]:
    """Parts and notes of a marked folder, and leavings of killed writers."""
    try:
        if not is_marked(folder, SCORES):
            return []
        return [path for path in folder.iterdir() if _OURS.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(folder, error) from error


def _parts(folder: Path) -> list[Path]:
    return [path for path in _own_files(folder) if path.suffix == SUFFIX]


def _newest_first(paths: list[Path]) -> list[Path]:
    times = []
    for path in paths:
        with suppress(FileNotFoundError):
            times.append((-path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(times)]
