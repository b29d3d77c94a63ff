import math
import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from ticket_engine.errors import StoreError
from ticket_engine.ownership import MARK_FILE
from ticket_engine.parts import content_key, part_path, read_part, today, write_part
from ticket_engine.schemas import LOG_PROBS, REASON, STAGE, TICKET_KEY
from ticket_engine.store import StoredSummary, find_stored, keep_night, tidy_store

SCORE_KEY = "0123456789abcdef" * 4
OTHER_KEY = SCORE_KEY[:-1] + "0"  # same folder, another engine


def write(store: Path, first: int = 0, tickets: int = 40, score_key: str = SCORE_KEY) -> Path:
    """A part of tickets ``first, first + 1, ...``; the third of them could not be scored."""
    keys = [b"key-%012d" % (first + index) for index in range(tickets)]
    log_probs = np.random.default_rng(first).normal(size=(tickets, 3)).astype(np.float32)
    reasons: list[str | None] = [None] * tickets
    if tickets > 2:
        log_probs[2], reasons[2] = np.nan, "scores are not finite"
    path = part_path(store, score_key, content_key(keys))
    scores = {
        TICKET_KEY: keys,
        LOG_PROBS: pl.Series(log_probs, dtype=pl.Array(pl.Float32, 3)),
        STAGE: pl.Series([None, *range(1, tickets)], dtype=pl.Int16),
        REASON: pl.Series(reasons, dtype=pl.String),
    }
    write_part(path, score_key, pl.DataFrame(scores))
    return path


def keys_of(first: int, tickets: int = 40) -> pl.DataFrame:
    return pl.DataFrame({TICKET_KEY: [b"key-%012d" % (first + index) for index in range(tickets)]})


def look(store: Path, first: int = 0, tickets: int = 1000) -> tuple[pl.DataFrame, StoredSummary]:
    return find_stored(store, SCORE_KEY, keys_of(first, tickets))


def files_of(store: Path) -> list[str]:
    return sorted(path.name for path in (store / SCORE_KEY[:32]).glob("*.parquet"))


def a_night(store: Path, first: int, tickets: int, day: int) -> None:
    """Keep a night's scores as if it had been that day."""
    rows = keys_of(first, tickets).with_columns(
        pl.Series(LOG_PROBS, np.full((tickets, 3), -1.1, dtype=np.float32), dtype=pl.Array(pl.Float32, 3)),
        pl.lit(None, pl.Int16).alias(STAGE),
        pl.lit(None, pl.String).alias(REASON),
        pl.lit(day, pl.Int32).alias("used_day"),
    )
    keep_night(store, SCORE_KEY, [rows], [])


def test_a_part_reads_back_exactly_as_it_was_written(tmp_path: Path) -> None:
    path = write(tmp_path, first=7)
    frame = read_part(path, SCORE_KEY)
    assert frame is not None
    assert frame[TICKET_KEY].to_list() == [b"key-%012d" % (7 + index) for index in range(40)]
    expected = np.random.default_rng(7).normal(size=(40, 3)).astype(np.float32)
    expected[2] = np.nan
    np.testing.assert_array_equal(frame[LOG_PROBS].to_numpy(), expected)
    assert [other for other in path.parent.iterdir() if other.name != MARK_FILE] == [path]
    assert frame[STAGE].to_list() == [None, *range(1, 40)]
    assert frame[REASON].to_list() == [None, None, "scores are not finite"] + [None] * 37


def test_a_parts_name_depends_on_its_tickets_and_not_on_their_order() -> None:
    assert content_key([b"a", b"b"]) == content_key([b"b", b"a"])
    assert content_key([b"a", b"b"]) != content_key([b"a", b"c"])


def test_a_part_that_is_cut_short_is_not_trusted(tmp_path: Path) -> None:
    path = write(tmp_path, tickets=4)
    whole = path.read_bytes()
    for length in range(0, len(whole), 5):
        path.write_bytes(whole[:length])
        assert read_part(path, SCORE_KEY) is None, length


def test_a_part_with_a_flipped_bit_is_not_trusted_or_says_the_same(tmp_path: Path) -> None:
    path = write(tmp_path)
    whole = path.read_bytes()
    original = read_part(path, SCORE_KEY)
    rejected = 0
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place * 5 % 8)
        path.write_bytes(damaged)
        frame = read_part(path, SCORE_KEY)
        rejected += frame is None
        assert frame is None or (frame.equals(original) and frame.schema == original.schema), place
    assert rejected > len(whole) // 2


def test_a_changed_number_in_a_well_formed_part_is_not_trusted(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    path = write(tmp_path)
    table, footer = pq.read_table(path), pq.read_metadata(path).metadata
    reasons = table.column(REASON).to_pylist()
    reasons[2] = None
    changed = table.set_column(table.column_names.index(REASON), REASON, [reasons])
    with pq.ParquetWriter(path, changed.schema) as writer:
        writer.write_table(changed)
        writer.add_key_value_metadata({key: value for key, value in footer.items() if key != b"ARROW:schema"})
    assert read_part(path, SCORE_KEY) is None


def test_parts_of_another_engine_and_damaged_parts_are_rejected_and_removed(tmp_path: Path) -> None:
    good = write(tmp_path, first=0)
    torn, foreign = write(tmp_path, first=100), write(tmp_path, first=200, score_key=OTHER_KEY)
    torn.write_bytes(torn.read_bytes()[:-20])
    nonsense = good.with_name("0123456789abcdef" * 2 + ".parquet")
    nonsense.write_text("this is a table, trust me")
    known, summary = look(tmp_path)
    assert (summary.tickets, summary.parts, summary.rejected_parts) == (40, 1, 3)
    assert sorted(known[TICKET_KEY]) == [b"key-%012d" % index for index in range(40)]
    assert [path.exists() for path in (good, torn, foreign, nonsense)] == [True, False, False, False]


def test_a_part_that_cannot_be_read_for_a_moment_is_an_error_and_stays(tmp_path: Path) -> None:
    path = write(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (used[0] + 4, before[1]))
    try:
        with suppress(OSError):
            while True:
                used.append(os.open(os.devnull, os.O_RDONLY))
        for read in (lambda: read_part(path, SCORE_KEY), lambda: look(tmp_path)):
            with pytest.raises(StoreError, match="Too many open files"):
                read()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for number in used:
            os.close(number)
    assert len(read_part(path, SCORE_KEY)) == 40


def test_a_part_that_is_a_folder_or_may_not_be_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(StoreError, match=f"{path.name} cannot be read"):
        read_part(path, SCORE_KEY)


def test_a_ticket_in_two_parts_is_known_once_and_an_empty_store_knows_none(tmp_path: Path) -> None:
    empty, summary = look(tmp_path / "none")
    assert (len(empty), summary.tickets, summary.parts) == (0, 0, 0)
    write(tmp_path, first=0, tickets=10)
    write(tmp_path, first=5, tickets=10)
    known, summary = look(tmp_path)
    assert (len(known), summary.tickets, summary.parts) == (15, 15, 2)


def test_only_wanted_tickets_are_found_and_only_their_row_groups_are_read(tmp_path: Path) -> None:
    a_night(tmp_path, 0, 20_000, today())
    a_night(tmp_path, 50_000, 20_000, today())
    known, summary = look(tmp_path, 8_000, 500)
    assert sorted(known[TICKET_KEY]) == keys_of(8_000, 500)[TICKET_KEY].to_list()
    assert (summary.tickets, summary.parts, summary.read_rows) == (500, 1, 2 * 8192)
    nothing, summary = look(tmp_path, 30_000, 500)
    assert (len(nothing), summary.read_rows, summary.parts) == (0, 0, 0)


def test_a_night_stands_in_for_its_buckets_and_keeps_what_it_found(tmp_path: Path) -> None:
    paths = [write(tmp_path, first=first) for first in (0, 100)]
    found, _ = look(tmp_path, 0, 3)
    keep_night(tmp_path, SCORE_KEY, [found, *(read_part(path, SCORE_KEY) for path in paths[1:])], paths)
    assert [name[:6] for name in files_of(tmp_path)] == ["night-"]
    known, summary = look(tmp_path)
    assert summary.tickets == 2 + 39  # a ticket of each had no scores and is tried again
    expected = np.random.default_rng(100).normal(size=(40, 3)).astype(np.float32)
    first = known.filter(pl.col(TICKET_KEY) == b"key-%012d" % 100)[LOG_PROBS].to_list()[0]
    np.testing.assert_array_equal(np.array(first, dtype=np.float32), expected[0])
    keep_night(tmp_path, SCORE_KEY, [found.clear()], [])
    assert len(files_of(tmp_path)) == 1


@pytest.mark.parametrize("nights", [10, 100, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_nights_look_does_not_depend_on_how_many_nights_are_stored(tmp_path: Path, nights: int) -> None:
    """120 nights once meant 120 tables read whole for no hit."""
    sizes = [20 + night % 11 for night in range(nights)]
    for night, size in enumerate(sizes):
        a_night(tmp_path, 100 * night, size, today() - nights + night + 1)
        tidy_store(tmp_path, 2000)
    assert len(files_of(tmp_path)) <= 7 * (1 + math.ceil(math.log(nights, 8)))
    nothing, summary = look(tmp_path, 10**9, 1000)
    assert (len(nothing), summary.read_rows) == (0, 0)
    known, summary = look(tmp_path, 100 * (nights - 1), 20)
    assert (len(known), summary.parts) == (20, 1)
    assert summary.read_rows <= 8192
    everything = pl.concat([keys_of(100 * night, size) for night, size in enumerate(sizes)])
    assert len(find_stored(tmp_path, SCORE_KEY, everything)[0]) == sum(sizes)


def test_tickets_that_no_run_uses_leave_the_store_though_others_of_their_night_are_used(tmp_path: Path) -> None:
    """One common text once kept every night that had it alive."""
    for night in range(40):
        day = today() - 39 + night
        common, _ = look(tmp_path, 0, 1)
        a_night(tmp_path, 100 * (night + 1), 5, day)
        rows = common if len(common) else None
        if rows is None:
            a_night(tmp_path, 0, 1, day)
        else:
            keep_night(tmp_path, SCORE_KEY, [common.with_columns(pl.lit(day, pl.Int32).alias("used_day"))], [])
        tidy_store(tmp_path, 10 + today() - day)
        assert len(look(tmp_path, 100 * (night + 1), 5)[0]) == 5
    stored = sum(len(look(tmp_path, 100 * (night + 1), 5)[0]) for night in range(40)) // 5
    assert 10 <= stored <= 10 + 8  # those of ten days, and what still waits to be merged
    assert len(look(tmp_path, 0, 1)[0]) == 1


def test_merging_keeps_each_ticket_once_as_the_latest_night_has_it(tmp_path: Path) -> None:
    for night in range(8):
        a_night(tmp_path, 10 * night, 60, today() - 7 + night)
    assert tidy_store(tmp_path, 30) == 7
    assert len(files_of(tmp_path)) == 1
    assert pl.read_parquet(tmp_path / SCORE_KEY[:32] / files_of(tmp_path)[0])[TICKET_KEY].n_unique() == 130
    assert len(look(tmp_path)[0]) == 130
    assert len(pl.read_parquet(tmp_path / SCORE_KEY[:32] / files_of(tmp_path)[0])) == 130


def test_runs_that_look_while_another_merges_find_everything_and_cleaning_twice_at_once_fails_nobody(
    tmp_path: Path,
) -> None:
    for night in range(64):
        a_night(tmp_path, 100 * night, 30, today())
    wanted = pl.concat([keys_of(100 * night, 30) for night in range(64)])
    with ThreadPoolExecutor(4) as pool:
        looks = [pool.submit(find_stored, tmp_path, SCORE_KEY, wanted) for _ in range(3)]
        tidied = [pool.submit(tidy_store, tmp_path, 30) for _ in range(4)]
        looks += [pool.submit(find_stored, tmp_path, SCORE_KEY, wanted) for _ in range(6)]
        assert sum(job.result() for job in tidied) == 56 + 7
        assert {len(job.result()[0]) for job in looks} == {64 * 30}


def test_a_writer_that_is_killed_leaves_no_part(tmp_path: Path) -> None:
    code = (
        "import sys, numpy as np, polars as pl\n"
        "from pathlib import Path\n"
        "from ticket_engine.parts import write_part\n"
        "rows = 400_000\n"
        "keys = pl.Series([b'%016d' % row for row in range(rows)])\n"
        "log_probs = np.random.default_rng(0).normal(size=(rows, 12)).astype(np.float32)\n"
        "for number in range(1000):\n"
        "    empty = {'stage': pl.Series([None] * rows, dtype=pl.Int16), 'reason': pl.Series([None] * rows, dtype=pl.String)}\n"
        "    array = pl.Series(log_probs, dtype=pl.Array(pl.Float32, 12))\n"
        "    scores = pl.DataFrame({'ticket_key': keys, 'log_probs': array, **empty})\n"
        "    write_part(Path(sys.argv[1]) / 'ab' / f'{number}.parquet', 'key', scores)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    staged: list[Path] = []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and writer.poll() is None:
        staged = [path for path in tmp_path.glob("*/*.part") if path.stat().st_size > 10_000]
        if staged:
            break
        time.sleep(0.002)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert staged, "the writer never got as far as writing"
    assert list(tmp_path.glob("*/*.part")), "the writer was not killed in the middle of a part"
    assert all(read_part(path, "key") is not None for path in tmp_path.glob("*/*.parquet"))


def test_a_writer_that_finds_the_disk_full_leaves_neither_a_part_nor_a_half_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write(tmp_path, tickets=2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [MARK_FILE]


def test_cleaning_removes_what_no_run_used_for_so_many_days_and_nothing_else(tmp_path: Path) -> None:
    used, unused = write(tmp_path, first=0), write(tmp_path, first=100)
    leaving = used.with_name("tmp1234.part")
    leaving.write_bytes(b"half a part")
    long_ago = time.time() - 31 * 86400
    for path in (unused, leaving):
        os.utime(path, (long_ago, long_ago))
    a_night(tmp_path, 300, 5, today() - 31)
    a_night(tmp_path, 400, 5, today() - 29)
    look(tmp_path, 100, 1)  # looking alone does not keep a part
    assert tidy_store(tmp_path, 32) == 0
    assert tidy_store(tmp_path, 30) == 3
    assert [path.exists() for path in (used, unused, leaving)] == [True, False, False]
    assert (len(look(tmp_path, 300, 5)[0]), len(look(tmp_path, 400, 5)[0])) == (0, 5)
    assert tidy_store(tmp_path / "none", 30) == 0


def test_a_store_given_as_a_folder_with_other_things_touches_none_of_them(tmp_path: Path) -> None:
    """``--store data`` in a folder whose ``data/*/*`` are years of exports."""
    mine = [tmp_path / "exports" / "2020.parquet", tmp_path / SCORE_KEY[:32] / "notes.txt"]
    mine += [tmp_path / "exports" / ("ab" * 16 + ".parquet"), tmp_path / SCORE_KEY[:32] / "table.parquet"]
    part = write(tmp_path)
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("years of work")
    long_ago = time.time() - 400 * 86400
    for path in (*mine, part):
        os.utime(path, (long_ago, long_ago))
    assert tidy_store(tmp_path, 30) == 1
    assert not part.exists()
    assert look(tmp_path)[1].rejected_parts == 0
    assert all(path.read_text() == "years of work" for path in mine)
