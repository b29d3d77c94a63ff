"""Where tickets come from: Parquet files on disk or behind a URL, opened so that every fault has one clear message.

A table is read in slices of rows, one after the other, so that memory stays flat at any number of rows.
"""

import glob
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from polars.exceptions import DuplicateError, PanicException, PolarsError

from ticket_engine.errors import InputError

PARQUET_ENDINGS: Final = (".parquet", ".parq", ".pq")
READ_ERRORS: Final = (PolarsError, PanicException, OSError)  # PanicException is not an Exception

_MAGIC, _MAGIC_ENCRYPTED = b"PAR1", b"PARE"
_SMALLEST_FILE = 12  # bytes: magic, footer length, magic
_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://")
_WILDCARD = re.compile(r"[*?\[]")
_STDERR = 2
_stderr_lock = threading.Lock()

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TicketTable:
    """A table of tickets that was opened and whose columns are known.

    ``name`` is what the caller wrote, without a URL's query; ``files`` are local paths in reading order, empty for
    a URL. ``partitions`` are the names of columns that come from ``key=value`` folders of local paths.
    """

    name: str
    frame: pl.LazyFrame
    schema: pl.Schema
    files: tuple[str, ...]
    partitions: frozenset[str]

    def read(self, columns: list[str], *, start: int = 0, rows: int | None = None) -> pl.DataFrame:
        """Some columns of ``rows`` rows (``None``: all) from row ``start`` on, in input order.

        Raises:
            InputError: A file is damaged, unreadable, or not like the others.
        """
        wanted = self.frame.select(pl.selectors.by_name(columns)).slice(start, rows)
        try:
            with _panics_kept_off_the_terminal():
                return wanted.collect(engine="streaming")
        except READ_ERRORS as error:
            raise self._input_error(error, columns) from error

    def count_rows(self) -> int:
        """Rows of the table by its files' own footers, which reading the columns does not go through."""
        if not self.files:
            return self.frame.select(pl.len()).collect().item()
        return sum(_rows_of_file(path) for path in self.files)

    def _input_error(self, error: BaseException, columns: list[str]) -> InputError:
        if len(self.files) < 2:
            return _as_input_error(self.files[0] if self.files else self.name, error, local=bool(self.files))
        counts = pl.selectors.by_name(columns, require_all=False).count()  # decodes the columns, holds no values
        for path in self.files:
            try:
                with _panics_kept_off_the_terminal():
                    pl.scan_parquet(path, glob=False, hive_partitioning=False).select(counts).collect()
            except READ_ERRORS as alone:
                return _as_input_error(path, alone, local=True)
        return _as_input_error(self.name, error, local=True)


def open_table(source: str) -> TicketTable:
    """A table of tickets, its files found and checked from their first and last bytes and their schemas.

    Args:
        source: A Parquet file; a folder, searched with its subfolders for files that end in `PARQUET_ENDINGS`
            (names that begin with ``.`` or ``_`` are passed over); a glob; or a URL such as ``s3://bucket/path``
            that Polars opens with the credentials of the environment. Files are read in the order of their paths.
            Folders named ``key=value`` below the given one become text columns.

    Raises:
        InputError: Nothing is there, a file is no Parquet file, cut off, encrypted, damaged or unreadable, or
            the files do not have the same columns.
    """
    if not source.strip():
        raise InputError("The input is an empty string. Give a Parquet file, a folder, a glob or a URL.")
    if _URL.match(source) and not source.startswith("file://"):
        return _open_url(source)
    path = unquote(urlsplit(source).path) if source.startswith("file://") else os.path.expanduser(source)
    files, partitions = _find_files(path)
    with _panics_kept_off_the_terminal():
        shared = _shared_schema(files)
        try:
            frame = _scan(files, shared, partitions)
            return TicketTable(source, frame, frame.collect_schema(), tuple(files), partitions)
        except READ_ERRORS as error:
            raise _as_input_error(files[0], error, local=True) from error


def _scan(files: list[str], schema: pl.Schema, keys: frozenset[str]) -> pl.LazyFrame:
    """The files' rows, and a text column for each ``key=value`` folder below the given path: 01001 is not 1001."""
    outside = {part.split("=")[0] for file in files for part in Path(file).parent.parts if "=" in part} - keys
    if keys and outside:  # Polars would take the folders above for columns too
        values = [dict(part.split("=", 1) for part in Path(file).parent.parts if "=" in part) for file in files]
        return pl.concat(
            pl.scan_parquet(file, glob=False, hive_partitioning=False, schema=schema).with_columns(
                pl.lit(_hive_value(found[key]), pl.String).alias(key) for key in sorted(keys)
            )
            for file, found in zip(files, values, strict=True)
        )
    types = dict.fromkeys(sorted(keys), pl.String())
    return pl.scan_parquet(files, glob=False, hive_partitioning=bool(keys), hive_schema=types or None, schema=schema)


def _hive_value(text: str) -> str | None:
    return None if text == "__HIVE_DEFAULT_PARTITION__" else unquote(text)


def _rows_of_file(path: str) -> int:
    try:
        return pq.read_metadata(path).num_rows
    except (pa.ArrowException, OSError):  # a footer that Polars reads and pyarrow does not
        return pl.scan_parquet(path, glob=False, hive_partitioning=False).select(pl.len()).collect().item()


def _open_url(url: str) -> TicketTable:
    name = url.split("?")[0]
    hive = True if "=" in name and _WILDCARD.search(name) else None  # None: Polars decides, on for folders
    try:
        frame = pl.scan_parquet(url, hive_partitioning=hive, hidden_file_prefix=[".", "_"])
        with _panics_kept_off_the_terminal():
            return TicketTable(name, frame, frame.collect_schema(), (), frozenset())
    except READ_ERRORS as error:
        raise _as_input_error(name, error, local=False) from error


def _find_files(path: str) -> tuple[list[str], frozenset[str]]:
    """Local files in the order of their paths, and the keys of ``key=value`` folders on them."""
    if os.path.lexists(path):
        base, found = path, [path]
    else:
        base = path[: match.start()] if (match := _WILDCARD.search(path)) else path
        base = base[: base.rfind(os.sep) + 1]
        found = sorted(glob.glob(path, recursive=True)) if match else []
        if not found:
            what = "Nothing matches" if match else "There is no file or folder"
            raise InputError(f"{what} {path}. Give a Parquet file, a folder, a glob or a URL such as s3://bucket/path.")
    files = [file for place in found for file in (_files_of_folder(place) if os.path.isdir(place) else [place])]
    for file in files:
        _check_ends(file)
    folders = (part for file in files for part in Path(os.path.relpath(file, base or ".")).parent.parts)
    return files, frozenset(part.split("=")[0] for part in folders if "=" in part)


def _files_of_folder(folder: str) -> list[str]:
    """Parquet files below a folder, links followed, hidden names passed over."""
    found, others, seen = [], 0, set()
    for here, folders, names in os.walk(folder, onerror=_refuse_folder, followlinks=True):
        identity = os.stat(here).st_dev, os.stat(here).st_ino
        folders[:] = [] if identity in seen else sorted(name for name in folders if name[0] not in "._")
        names = [] if identity in seen else [name for name in names if name[0] not in "._"]
        seen.add(identity)
        parquet = [name for name in names if name.lower().endswith(PARQUET_ENDINGS)]
        others += len(names) - len(parquet)
        found += [os.path.join(here, name) for name in parquet]
    if not found:
        endings = ", ".join(PARQUET_ENDINGS)
        raise InputError(
            f"The folder {folder} holds no Parquet file (names that end in {endings}; other files there: {others}). "
            "Give another folder, or name files with a glob."
        )
    return sorted(found)


def _refuse_folder(error: OSError) -> None:
    raise InputError(f"The folder {error.filename} cannot be read: {error.strerror}.") from error


def _check_ends(path: str) -> None:
    """Raises `InputError` if the first and last bytes of a file are not those of a Parquet file."""
    try:
        path.encode()
        if not os.path.isfile(path) and os.path.exists(path):
            raise InputError(f"{path} is neither a file nor a folder. Give a Parquet file.")
        with open(path, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            first = handle.read(4)
            handle.seek(max(0, size - 4))
            last = handle.read(4)
    except UnicodeEncodeError:
        raise InputError(f"The file name {path!a} is not valid UTF-8. Rename the file.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    if size == 0:
        raise InputError(f"{path} is empty (0 bytes), not a Parquet file. Write it again.")
    if last == _MAGIC_ENCRYPTED:
        raise InputError(_ENCRYPTED.format(path))
    if first != _MAGIC or size < _SMALLEST_FILE:
        raise InputError(
            f"{path} is not a Parquet file, or it is cut off ({size:,} bytes). "
            "Write it again; turn CSV or JSON into Parquet first."
        )
    if last != _MAGIC:
        raise InputError(f"{path} is cut off: it begins like a Parquet file, but its end is missing. Write it again.")


_ENCRYPTED = "{} is encrypted, and encrypted Parquet files are not supported. Decrypt it first."


def _shared_schema(files: list[str]) -> pl.Schema:
    """Columns and types that all files have, in the order of the first.

    A column without any value may have the type Null in some files, as pandas writes it.

    Raises:
        InputError: A file's footer is damaged, or a file differs from the first; names file and column.
    """
    shared = pl.Schema()
    for index, path in enumerate(files):
        try:
            schema = pl.scan_parquet(path, glob=False, hive_partitioning=False).collect_schema()
        except READ_ERRORS as error:
            raise _as_input_error(path, error, local=True) from error
        if index == 0:
            shared = schema
            continue
        for column in [*shared, *(column for column in schema if column not in shared)]:
            here, there = schema.get(column), shared.get(column)
            if here is not None and there == pl.Null:
                shared[column] = here
            elif here != there and (here is None or here != pl.Null):
                seen = ["no such column" if kind is None else type_name(kind) for kind in (here, there)]
                raise InputError(
                    f"{path} and {files[0]} differ in the column {column!r}: {seen[0]} and {seen[1]}. "
                    "All files of one run must have the same columns and types."
                )
    return shared


def type_name(dtype: pl.DataType) -> str:
    """A column type as messages show it: without the categories of an Enum, cut to 80 characters."""
    return "Enum" if isinstance(dtype, pl.Enum) else str(dtype)[:80]


def _as_input_error(name: str, error: BaseException, *, local: bool) -> InputError:
    """What went wrong while Polars read, in one line. Its messages about files hold no values of the table."""
    found = re.sub(r"\?\S*", "", next(iter(str(error).splitlines()), ""))[:200].rstrip(".")  # no URL queries
    if "ncrypt" in found:
        return InputError(_ENCRYPTED.format(name))
    if "invalid UTF-8" in found:
        return InputError(f"{name} is damaged: a text column is not valid UTF-8. Write it again as UTF-8.")
    if isinstance(error, DuplicateError):
        return InputError(f"{name} has two columns of the same name. Rename one.")
    if local and isinstance(error, OSError):
        return InputError(f"{name} cannot be read: {error.strerror or found}.")
    if local or found.startswith("parquet: "):
        known = found.removeprefix("parquet: ").removeprefix("File out of specification: ")
        detail = f" ({known})" if known != found else ""
        return InputError(f"{name} is damaged, or written in a way that Polars cannot read{detail}. Write it again.")
    if "not found" in found or "paths were empty" in found:
        found = "there is nothing (the address of a folder ends in /)"
    return InputError(
        f"{name} cannot be read: {found}. Check the address; Polars takes credentials from the environment "
        "(s3, gs, az, http and hf URLs)."
    )


@contextmanager
def _panics_kept_off_the_terminal() -> Iterator[None]:
    """Hold back what the process writes to standard error, and pass it on afterwards unless Polars panicked.

    Rust prints a panic with its stack before Python sees the exception, and has no switch for it. The block is one
    read, so other threads' lines are late by a second at most; after a panic they go to the debug log.
    """
    with _stderr_lock, tempfile.TemporaryFile() as held:
        if sys.stderr is None:  # the process has no standard error
            yield
            return
        sys.stderr.flush()
        saved = os.dup(_STDERR)
        os.dup2(held.fileno(), _STDERR)
        panicked = False
        try:
            yield
        except PanicException:
            panicked = True
            raise
        finally:
            os.dup2(saved, _STDERR)
            os.close(saved)
            held.seek(0)
            if panicked:
                log.debug("Polars panicked: %s", held.read().decode(errors="replace"))
            else:
                with open(_STDERR, "wb", closefd=False) as stderr:
                    shutil.copyfileobj(held, stderr)
