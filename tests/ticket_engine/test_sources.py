"""Finding and opening tickets: files, folders, globs, partitions, URLs, and every way in which a file can be broken."""

import http.server
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ticket_engine.errors import InputError
from ticket_engine.sources import _panics_kept_off_the_terminal, open_table

CASES = Path(__file__).parents[3] / "shared" / "data" / "parquet-cases"
needs_cases = pytest.mark.skipif(not CASES.is_dir(), reason="../shared/data is not here")


def frame(*ids: str) -> pl.DataFrame:
    """Tickets with a body each."""
    return pl.DataFrame({"ticket_id": ids, "body": [f"Text of {name}" for name in ids]})


def ids_of(source: Path | str) -> list[str]:
    """The ids that are read from a source, in order."""
    return open_table(str(source)).read(["ticket_id"])["ticket_id"].to_list()


def message_of(source: Path | str, columns: list[str] | None = None) -> str:
    """The one message with which opening a source, or reading columns of it, is refused."""
    with pytest.raises(InputError) as caught:
        open_table(str(source)).read(columns or ["ticket_id"])
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


@needs_cases
@pytest.mark.parametrize(
    ("name", "columns", "words"),
    [
        ("dd-invalid", ["X1"], "not valid UTF-8"),
        ("pt-bad-PARQUET-1481", ["int96_field"], "is damaged"),
        ("dd-parquet_column_num_values_mismatch", ["x", "n", "s"], "is damaged"),
        ("pt-encrypt_columns_and_footer", ["ticket_id"], "is encrypted"),
        ("at-fuzz-8bytes", ["ticket_id"], "not a Parquet file, or it is cut off (8 bytes)"),
    ],
)
def test_a_broken_file_is_refused_with_one_clean_message(
    name: str, columns: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    message = message_of(CASES / f"{name}.parquet", columns)
    assert words in message
    assert f"{name}.parquet" in message
    assert capfd.readouterr().err == ""


@needs_cases
@pytest.mark.parametrize(
    ("name", "columns", "rows"),
    [
        ("dd-silly-names", ["önë", "", "🦆"], 3),
        ("dd-nullbyte", ["42", "hello world"], 1),
        ("fp-spark-empty-rg", ["id", "Date"], 0),
        ("dd-manyrowgroups", ["42"], 1001),
        ("pt-binary", ["foo"], 12),
        ("pt-nested_lists.snappy", ["a", "b"], 3),
        ("pt-int96_from_spark", ["a"], 6),
    ],
)
def test_an_odd_but_valid_file_is_read(name: str, columns: list[str], rows: int) -> None:
    table = open_table(str(CASES / f"{name}.parquet"))
    assert list(table.schema) == columns
    read = table.read(columns)
    assert read.shape == (rows, len(columns))
    assert read.columns == columns


@needs_cases
def test_a_file_without_columns_can_be_opened() -> None:
    assert len(open_table(str(CASES / "fp-no_columns.parquet")).schema) == 0


def test_files_that_are_not_parquet_are_refused(tmp_path: Path) -> None:
    frame("a", "b").write_parquet(tmp_path / "good.parquet")
    whole = (tmp_path / "good.parquet").read_bytes()
    for name, content, words in [
        ("empty.parquet", b"", "is empty (0 bytes)"),
        ("csv.parquet", b"ticket_id,body\na,Text of a\n", "not a Parquet file"),
        ("cut.parquet", whole[:-20], "is cut off"),
        ("beginning.parquet", whole[:9], "not a Parquet file, or it is cut off (9 bytes)"),
        ("end.parquet", whole[20:], "not a Parquet file, or it is cut off"),
    ]:
        (tmp_path / name).write_bytes(content)
        assert words in message_of(tmp_path / name)


def test_damage_inside_a_column_is_found_while_reading_and_the_file_is_named(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        frame(*(f"{name}{index}" for index in range(500))).write_parquet(tmp_path / f"{name}.parquet")
    content = bytearray((tmp_path / "two.parquet").read_bytes())
    content[4:60] = bytes(56)  # the first page of ticket_id, past the magic
    (tmp_path / "two.parquet").write_bytes(content)
    table = open_table(str(tmp_path))
    with pytest.raises(InputError, match=r"two\.parquet is damaged"):
        table.read(["ticket_id"])


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table([["a"], ["b"], ["c"]], names=["ticket_id", "body", "body"]), tmp_path / "x.parquet")
    assert "two columns of the same name" in message_of(tmp_path / "x.parquet")


def test_places_without_tickets_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.parquet").mkdir()
    assert "There is no file or folder" in message_of(tmp_path / "missing.parquet")
    assert "Nothing matches" in message_of(tmp_path / "*.csv")
    assert "holds no Parquet file" in message_of(tmp_path / "folder.parquet")
    (tmp_path / "folder.parquet" / "notes.txt").write_text("hello")
    assert "other files there: 1" in message_of(tmp_path / "folder.parquet")
    assert "empty string" in message_of("  ")
    os.mkfifo(tmp_path / "pipe.parquet")
    assert "neither a file nor a folder" in message_of(tmp_path / "pipe.parquet")
    (tmp_path / "link.parquet").symlink_to(tmp_path / "gone")
    assert "cannot be read: No such file" in message_of(tmp_path / "link.parquet")


def test_a_file_name_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.parquet")
    Path(path).write_bytes(b"PAR1")
    assert "not valid UTF-8" in message_of(path)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter; pytest's own ones are closed to others."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_files_and_folders_without_read_permission_are_refused(open_folder: Path) -> None:
    file, folder = open_folder / "file.parquet", open_folder / "folder"
    frame("a").write_parquet(file)
    folder.mkdir()
    frame("b").write_parquet(folder / "b.parquet")
    file.chmod(0o000)
    folder.chmod(0o000)
    # Root may read everything, so the check runs as another user.
    code = (
        "import os, sys, ticket_engine.sources as s\n"
        "if os.geteuid() == 0: os.setegid(65534); os.seteuid(65534)\n"
        "for path in sys.argv[1:]:\n"
        "    try: s.open_table(path)\n"
        "    except s.InputError as error: print(error)\n"
    )
    command = [sys.executable, "-c", code, str(file), str(folder), str(open_folder)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    folder.chmod(0o755)
    assert lines == [
        f"{file} cannot be read: Permission denied.",
        f"The folder {folder} cannot be read: Permission denied.",
        f"The folder {folder} cannot be read: Permission denied.",
    ]


def test_a_folder_is_read_with_its_subfolders_in_the_order_of_paths(tmp_path: Path) -> None:
    for path in ("b.parquet", "a/2.PARQUET", "a/1.pq", "c/deep/x.parq", "_temporary/no.parquet", ".hidden.parquet"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        frame(path).write_parquet(tmp_path / path)
    for name in ("_SUCCESS", "README.md", ".part.crc"):
        (tmp_path / name).touch()
    assert ids_of(tmp_path) == ["a/1.pq", "a/2.PARQUET", "b.parquet", "c/deep/x.parq"]
    assert ids_of(f"{tmp_path}/") == ids_of(tmp_path)
    assert ids_of(tmp_path / "*" / "*.p*") == ["_temporary/no.parquet", "a/1.pq"]
    assert ids_of(tmp_path / "**" / "*.parq") == ["c/deep/x.parq"]
    assert ids_of(tmp_path / "[ac]") == ["a/1.pq", "a/2.PARQUET", "c/deep/x.parq"]


def test_links_are_followed_and_a_circle_of_links_ends(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "tickets").mkdir()
    frame("far").write_parquet(tmp_path / "elsewhere" / "far.parquet")
    frame("near").write_parquet(tmp_path / "tickets" / "near.parquet")
    (tmp_path / "tickets" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "tickets" / "round").symlink_to(tmp_path / "tickets")
    assert sorted(ids_of(tmp_path / "tickets")) == ["far", "near"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path: Path) -> None:
    frame("brackets").write_parquet(tmp_path / "tickets[1].parquet")
    frame("plain").with_columns(more=1).write_parquet(tmp_path / "tickets1.parquet")
    assert ids_of(tmp_path / "tickets[1].parquet") == ["brackets"]
    assert ids_of(tmp_path / "tickets[0-9].parquet") == ["plain"]


def test_a_file_url_is_a_local_path(tmp_path: Path) -> None:
    frame("a").write_parquet(tmp_path / "with space.parquet")
    assert ids_of((tmp_path / "with space.parquet").as_uri()) == ["a"]


def test_partitions_below_the_given_folder_become_columns(tmp_path: Path) -> None:
    for day, region in (("2026-11-30", "north"), ("2026-12-01", "south%2Feast")):
        folder = tmp_path / f"day={day}" / f"region={region}"
        folder.mkdir(parents=True)
        frame(day).write_parquet(folder / "part.parquet")
    for source in (tmp_path, tmp_path / "day=*"):
        table = open_table(str(source))
        assert table.schema == {"ticket_id": pl.String, "body": pl.String, "day": pl.String, "region": pl.String}
        assert table.partitions == {"day", "region"}
        assert table.read(["region"])["region"].to_list() == ["north", "south/east"]
    above = open_table(str(tmp_path / "day=2026-11-30" / "region=north" / "part.parquet"))
    assert list(above.schema) == ["ticket_id", "body"]


def test_a_partitions_value_stays_the_text_that_its_folder_says(tmp_path: Path) -> None:
    folder = tmp_path / "code=01001" / "when=2026-11-30"
    folder.mkdir(parents=True)
    frame("a").write_parquet(folder / "part.parquet")
    row = open_table(str(tmp_path)).read(["code", "when"])
    assert row.rows() == [("01001", "2026-11-30")]


def test_folders_above_the_given_one_are_no_columns_whatever_lies_below(tmp_path: Path) -> None:
    base = tmp_path / "x=2" / "plain"
    for value in ("3", "__HIVE_DEFAULT_PARTITION__", "a%20b"):
        (base / f"y={value}").mkdir(parents=True)
        frame(value).write_parquet(base / f"y={value}" / "part.parquet")
    table = open_table(str(base))
    assert list(table.schema) == ["ticket_id", "body", "y"]
    assert table.partitions == {"y"}
    assert table.read(["y"])["y"].to_list() == ["3", None, "a b"]
    assert table.read(["y"], start=1, rows=1)["y"].to_list() == [None]


def test_files_with_other_columns_are_refused_by_name(tmp_path: Path) -> None:
    frame("a").write_parquet(tmp_path / "1.parquet")
    frame("b").select("body", "ticket_id").write_parquet(tmp_path / "2.parquet")
    assert ids_of(tmp_path) == ["a", "b"]  # the order of columns does not matter
    for other, words in [
        (frame("c").with_columns(extra=1), "in the column 'extra': Int32 and no such column"),
        (frame("c").drop("body"), "in the column 'body': no such column and String"),
        (frame("c").with_columns(body=b"c"), "in the column 'body': Binary and String"),
    ]:
        other.write_parquet(tmp_path / "3.parquet")
        message = message_of(tmp_path)
        assert words in message
        assert "3.parquet" in message


def test_a_column_may_be_without_any_value_in_some_files(tmp_path: Path) -> None:
    without = frame("a").with_columns(subject=None)
    with_value = frame("b").with_columns(subject=pl.lit("Subject"))
    for first, second in ((without, with_value), (with_value, without)):
        first.write_parquet(tmp_path / "1.parquet")
        second.write_parquet(tmp_path / "2.parquet")
        table = open_table(str(tmp_path))
        assert table.schema["subject"] == pl.String
        assert table.read(["subject"])["subject"].to_list() == [None, "Subject"][:: 1 if first is without else -1]


def test_slices_of_rows_go_across_files_in_input_order(tmp_path: Path) -> None:
    for index in range(4):
        ids = [f"{index}-{row}" for row in range(5)]
        frame(*ids).write_parquet(tmp_path / f"{index}.parquet", row_group_size=2)
    table = open_table(str(tmp_path))
    whole = table.read(["ticket_id"])
    for start in range(0, 20, 3):
        assert table.read(["ticket_id"], start=start, rows=3).equals(whole[start : start + 3])


def test_column_names_that_look_like_patterns_are_names(tmp_path: Path) -> None:
    pl.DataFrame({"^.*$": ["a"], "*": ["b"], "c": ["c"]}).write_parquet(tmp_path / "x.parquet")
    table = open_table(str(tmp_path / "x.parquet"))
    assert table.read(["^.*$"]).columns == ["^.*$"]
    assert table.read(["*", "^.*$"]).row(0) == ("b", "a")


def test_what_others_write_to_standard_error_while_reading_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    with _panics_kept_off_the_terminal():
        os.write(2, b"a line of another thread\n")
        assert capfd.readouterr().err == ""
    assert capfd.readouterr().err == "a line of another thread\n"


class _RangeHandler(http.server.SimpleHTTPRequestHandler):
    """Serves ranges of files, as object stores do."""

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        content = path.read_bytes()
        first, last = 0, len(content) - 1
        if wanted := self.headers.get("Range"):
            begin, end = wanted.removeprefix("bytes=").split("-")
            first = int(begin) if begin else max(0, len(content) - int(end))
            last = min(int(end), last) if begin and end else last
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(last - first + 1))
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[first : last + 1])

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web_folder(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a small web server and the folder that it serves."""

    def handler(*args: object) -> _RangeHandler:
        return _RangeHandler(*args, directory=str(tmp_path))

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", tmp_path
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_url_is_read_through_polars(web_folder: tuple[str, Path]) -> None:
    address, folder = web_folder
    frame("a", "b", "c").write_parquet(folder / "tickets.parquet")
    table = open_table(f"{address}/tickets.parquet")
    assert table.read(["ticket_id", "body"], start=1).equals(frame("b", "c"))


def test_faults_behind_a_url_are_told_without_the_query(web_folder: tuple[str, Path]) -> None:
    address, folder = web_folder
    (folder / "notes.parquet").write_bytes(b"PAR1 no table at all PAR1")
    missing = message_of(f"{address}/missing.parquet?sig=secret")
    assert "there is nothing" in missing
    assert "secret" not in missing
    assert "notes.parquet is damaged" in message_of(f"{address}/notes.parquet")


def test_an_unknown_kind_of_url_is_refused() -> None:
    message = message_of("gopher://store/tickets.parquet")
    assert message.startswith("gopher://store/tickets.parquet cannot be read")
    assert "s3, gs, az, http and hf" in message
