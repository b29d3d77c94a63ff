"""From a table to tickets and quarantine: every row has one outcome, in order, and rejected rows stay whole."""

import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from ticket_engine import reading
from ticket_engine.errors import InputError
from ticket_engine.reading import ReadSummary, quarantine_late, read_tickets
from ticket_engine.schemas import ID_TYPES

SHARED = Path(__file__).parents[3] / "shared" / "data"
CASES, SETS = SHARED / "parquet-cases", SHARED / "tickets"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data is not here")
WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2009\u200a\u2028\u2029\u202f\u205f\u3000"


def read(
    table: pl.DataFrame | Path,
    folder: Path,
    *,
    id_column: str = "ticket_id",
    text_columns: tuple[str, ...] = ("subject", "body"),
    limit: int | None = None,
) -> tuple[ReadSummary, pl.DataFrame, pl.DataFrame]:
    """Summary, tickets and quarantine of a table."""
    source = table
    if isinstance(table, pl.DataFrame):
        source = folder / "input.parquet"
        table.write_parquet(source, row_group_size=4)
    summary = read_tickets(str(source), folder, id_column=id_column, text_columns=text_columns, limit=limit)
    tickets, quarantine = (
        pl.read_parquet(folder / f"{name}.parquet", glob=False) for name in ("tickets", "quarantine")
    )
    return summary, tickets, quarantine


def refusal(table: pl.DataFrame | Path, folder: Path, **columns: object) -> str:
    """The message with which a table is refused; nothing is written."""
    with pytest.raises(InputError) as caught:
        read(table, folder, **columns)
    assert not (folder / "quarantine.parquet").exists()
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def expected_outcomes(table: pl.DataFrame) -> tuple[list[tuple], list[tuple]]:
    """Tickets (id, index, text) and rejects (index, reason) of a table, by a plain loop over its rows."""
    tickets, rejects, seen = [], [], set()
    for index, (ticket_id, subject, body) in enumerate(table.select("ticket_id", "subject", "body").rows()):
        parts = [part for part in (subject, body) if part and part.strip(WHITE_SPACE + "\0").strip("\0")]
        parts = [part for part in parts if set(part) - set(WHITE_SPACE) - {"\0"}]
        if ticket_id is None:
            rejects.append((index, "null id"))
        elif ticket_id in seen:
            rejects.append((index, "repeated id"))
        elif not parts:
            rejects.append((index, "no text"))
        else:
            tickets.append((ticket_id, index, "\n".join(parts).replace("\0", "\ufffd").strip(WHITE_SPACE)))
        seen.add(ticket_id)
    return tickets, rejects


TEXTS = st.one_of(
    st.none(),
    st.text(st.sampled_from(WHITE_SPACE + "\0"), max_size=3),
    st.text(st.sampled_from(WHITE_SPACE + "\0aé\u200b注🦆.{}<|>"), max_size=6),
)
ROWS = st.tuples(st.one_of(st.none(), st.sampled_from(["", "a", "b", "c", "d", "e"])), TEXTS, TEXTS, st.integers(0, 9))


@given(rows=st.lists(ROWS, max_size=25), slice_rows=st.integers(1, 30), limit=st.one_of(st.none(), st.integers(1, 30)))
@settings(max_examples=150, deadline=None)
def test_every_row_has_the_outcome_of_a_plain_loop_in_input_order(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple], slice_rows: int, limit: int | None
) -> None:
    schema = {"ticket_id": pl.String, "subject": pl.String, "body": pl.String, "priority": pl.Int8}
    table = pl.DataFrame(rows, schema=schema, orient="row")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FIRST_ROWS", "MOST_ROWS", "QUARANTINE_ROWS"):
            patch.setattr(reading, name, slice_rows)
        patch.setattr(reading, "SLICE_BYTES", 100)
        summary, tickets, quarantine = read(table, tmp_path_factory.mktemp("run"), limit=limit)
    table = table.head(limit) if limit else table
    expected, rejects = expected_outcomes(table)
    assert tickets.schema == {"ticket_id": pl.String, "input_index": pl.UInt32, "text": pl.String}
    assert tickets.rows() == expected
    whole = table[[index for index, _ in rejects]]
    reasons = [reason for _, reason in rejects]
    assert_frame_equal(quarantine, whole.with_columns(pl.Series("reason", reasons, dtype=pl.String)))
    assert summary.rows == len(table) == summary.tickets + summary.quarantined
    assert (summary.tickets, summary.quarantined) == (len(tickets), len(quarantine))
    assert summary.reasons == {name: reasons.count(name) for name in ("null id", "repeated id", "no text")}
    lengths = [len(text) for _, _, text in expected] or [0]
    assert summary.text_characters["min"] == min(lengths)
    assert summary.text_characters["max"] == max(lengths)
    assert summary.text_characters["mean"] == pytest.approx(sum(lengths) / len(lengths))


@pytest.mark.parametrize("id_type", ID_TYPES, ids=str)
def test_the_id_column_keeps_its_type(tmp_path: Path, id_type: pl.DataType) -> None:
    table = pl.DataFrame({"key": pl.Series(["1", "2", "1"]).cast(id_type), "body": ["x", "y", "z"]})
    summary, tickets, quarantine = read(table, tmp_path, id_column="key")
    assert tickets.schema["ticket_id"] == quarantine.schema["key"] == id_type
    assert tickets["ticket_id"].to_list() == table["key"].head(2).to_list()
    assert summary.id_type == str(id_type())
    assert summary.text_columns == ("body",)


@pytest.mark.parametrize("id_type", [pl.Float64, pl.Date, pl.Binary, pl.Categorical, pl.Enum(["1", "2"]), pl.Boolean])
def test_other_types_of_ids_are_refused_with_their_type(tmp_path: Path, id_type: pl.DataType) -> None:
    table = pl.DataFrame({"ticket_id": pl.Series([None], dtype=id_type), "body": ["x"]})
    name = "Enum" if isinstance(id_type, pl.Enum) else str(id_type())
    assert f"id column 'ticket_id' of {tmp_path}/input.parquet is {name}." in refusal(table, tmp_path)


@pytest.mark.parametrize("text_type", [pl.String, pl.Categorical, pl.Enum(["one", "two"]), pl.Null])
def test_text_may_be_any_kind_of_string(tmp_path: Path, text_type: pl.DataType) -> None:
    texts = [None, None] if text_type == pl.Null else ["one", "two"]
    table = pl.DataFrame({"ticket_id": [1, 2], "subject": pl.Series(texts, dtype=text_type), "body": ["x", "y"]})
    _, tickets, _ = read(table, tmp_path)
    assert tickets["text"].to_list() == (["x", "y"] if text_type == pl.Null else ["one\nx", "two\ny"])


@pytest.mark.parametrize("values", [[1], [b"x"], [["x"]], [{"text": "x"}], [True], [1.5]], ids=str)
def test_a_text_column_that_is_not_text_is_refused_with_its_type(tmp_path: Path, values: list) -> None:
    table = pl.DataFrame({"ticket_id": ["a"], "body": values})
    message = refusal(table, tmp_path)
    assert f"text column 'body' of {tmp_path}/input.parquet is {table.schema['body']}, not text" in message


def test_a_missing_column_is_named_with_the_columns_that_are_there(tmp_path: Path) -> None:
    table = pl.DataFrame({"ticket_id": ["a"], **{f"column{index}": ["x"] for index in range(20)}})
    assert "no column 'body'. Its columns: 'ticket_id', 'column0'" in refusal(table, tmp_path, text_columns=("body",))
    assert "(21 in all)" in refusal(table, tmp_path, text_columns=("body",))
    assert "no column 'id'" in refusal(table, tmp_path, id_column="id")
    assert "no column 'subject'" in refusal(table, tmp_path)
    assert "no column 'body'" in refusal(table.with_columns(subject=pl.lit("x")), tmp_path)
    assert "names a column twice" in refusal(table, tmp_path, text_columns=("column1", "column1"))


def test_only_the_subject_may_be_missing(tmp_path: Path) -> None:
    summary, tickets, _ = read(pl.DataFrame({"ticket_id": ["a"], "body": ["x"]}), tmp_path)
    assert summary.text_columns == ("body",)
    assert tickets["text"].to_list() == ["x"]


@pytest.mark.parametrize("name", ["label", "stage", "needs_review", "bucket_index", "token_length", "log_probs"])
def test_an_id_column_named_like_a_column_of_the_results_is_refused(tmp_path: Path, name: str) -> None:
    message = refusal(pl.DataFrame({name: ["a"], "body": ["x"]}), tmp_path, id_column=name)
    assert f"cannot be named {name!r}" in message


def test_columns_named_like_ours_are_read_and_stay_whole_in_quarantine(tmp_path: Path) -> None:
    names = ["text", "reason", "input_reason", "input_index", "token_length", "label", "ticket_key", "id", "", "^x$"]
    table = pl.DataFrame({"ticket_id": ["a", "a"], **{name: [f"{name} 1", f"{name} 2"] for name in names}})
    text_columns = ("text", "reason", "input_index", "", "^x$")
    _, tickets, quarantine = read(table, tmp_path, text_columns=text_columns)
    assert tickets.rows() == [("a", 0, "text 1\nreason 1\ninput_index 1\n 1\n^x$ 1")]
    assert quarantine.columns == [
        *("ticket_id", "text", "input_input_reason", "input_reason", "input_index", "token_length", "label"),
        *("ticket_key", "id", "", "^x$", "reason"),
    ]
    assert quarantine.row(0) == ("a", *(f"{name} 2" for name in names), "repeated id")


def test_partition_columns_are_in_the_quarantine(tmp_path: Path) -> None:
    for day in ("2026-11-30", "2026-12-01"):
        (tmp_path / "in" / f"day={day}").mkdir(parents=True)
        table = pl.DataFrame({"ticket_id": ["a", day], "body": ["x", "y"]})
        table.write_parquet(tmp_path / "in" / f"day={day}" / "part.parquet")
    _, tickets, quarantine = read(tmp_path / "in", tmp_path)
    assert tickets["ticket_id"].to_list() == ["a", "2026-11-30", "2026-12-01"]
    assert quarantine.select(pl.col("ticket_id"), pl.col("day").cast(pl.String), "reason").rows() == [
        ("a", "2026-12-01", "repeated id")
    ]
    assert "comes from a folder day=" in refusal_of_partition(tmp_path)


def refusal_of_partition(folder: Path) -> str:
    """The message for an id column that folder names give."""
    with pytest.raises(InputError) as caught:
        read(folder / "in", folder, id_column="day")
    return str(caught.value)


@pytest.mark.parametrize("rows", [0, 2])
def test_a_table_without_usable_rows_gives_empty_tables_of_the_right_types(tmp_path: Path, rows: int) -> None:
    table = pl.DataFrame({"ticket_id": [1, 2], "body": [None, "  "], "more": [[1.5], []]}).head(rows)
    summary, tickets, quarantine = read(table, tmp_path)
    assert tickets.schema == {"ticket_id": pl.Int64, "input_index": pl.UInt32, "text": pl.String}
    assert quarantine.schema == {**table.schema, "reason": pl.String}
    assert (len(tickets), len(quarantine), summary.tickets) == (0, rows, 0)
    assert summary.text_characters == {"min": 0.0, "mean": 0.0, "p95": 0.0, "max": 0.0}


def test_a_thousand_row_groups_are_read_as_one_table(tmp_path: Path) -> None:
    table = pl.DataFrame({"ticket_id": range(1001), "body": [f"Text {index}" for index in range(1001)]})
    table.write_parquet(tmp_path / "input.parquet", row_group_size=1)
    _, tickets, _ = read(tmp_path / "input.parquet", tmp_path)
    assert tickets["text"].to_list() == table["body"].to_list()


@pytest.mark.parametrize("name", ["run", ".run_date=2026-12-01.work", "ticket_id=[7]*"])
def test_tickets_rejected_late_join_the_quarantine_whole_and_in_order(tmp_path: Path, name: str) -> None:
    tmp_path = tmp_path / name
    tmp_path.mkdir()
    table = pl.DataFrame(
        {"ticket_id": ["a", "b", "c", "c", "d"], "body": ["v", " ", "w", "x", "y"], "more": [1, 2, 3, 4, 5]}
    )
    read(table, tmp_path)
    failed = pl.DataFrame(
        {"input_index": [4, 0], "reason": ["scores are not finite", "text merges with the prompt"]},
        schema={"input_index": pl.UInt32, "reason": pl.String},
    )
    failed.write_parquet(tmp_path / "failed.parquet")
    source = str(tmp_path / "input.parquet")
    assert quarantine_late(source, tmp_path, tmp_path / "failed.parquet") == 4
    reasons = ["text merges with the prompt", "no text", "repeated id", "scores are not finite"]
    expected = table[[0, 1, 3, 4]].with_columns(pl.Series("reason", reasons))
    assert_frame_equal(pl.read_parquet(tmp_path / "quarantine.parquet", glob=False), expected)
    before = (tmp_path / "quarantine.parquet").read_bytes()
    failed.clear().write_parquet(tmp_path / "failed.parquet")
    assert quarantine_late(source, tmp_path, tmp_path / "failed.parquet") == 2
    assert (tmp_path / "quarantine.parquet").read_bytes() == before


@pytest.mark.parametrize("change", ["other ids", "fewer rows"])
def test_a_table_that_changed_since_it_was_read_is_refused(tmp_path: Path, change: str) -> None:
    table = pl.DataFrame({"ticket_id": ["a", "b", "c"], "body": ["x", "y", "z"]})
    read(table, tmp_path)
    failed = pl.DataFrame({"input_index": [2], "reason": ["scores are not finite"]})
    failed.cast({"input_index": pl.UInt32}).write_parquet(tmp_path / "failed.parquet")
    changed = table.reverse() if change == "other ids" else table.head(2)
    changed.write_parquet(tmp_path / "input.parquet")
    with pytest.raises(InputError, match="changed while it was read"):
        quarantine_late(str(tmp_path / "input.parquet"), tmp_path, tmp_path / "failed.parquet")


def test_leavings_of_an_earlier_attempt_do_not_get_into_the_quarantine(tmp_path: Path) -> None:
    (tmp_path / "quarantine").mkdir()
    pl.DataFrame({"ticket_id": ["old"]}).write_parquet(tmp_path / "quarantine" / "000007.parquet")
    _, _, quarantine = read(pl.DataFrame({"ticket_id": ["a", "a"], "body": ["x", "y"]}), tmp_path)
    assert quarantine.rows() == [("a", "y", "repeated id")]


@needs_shared
@pytest.mark.parametrize(
    ("name", "columns", "words"),
    [
        ("dd-silly-names", ("ticket_id", "body"), "no column 'ticket_id'. Its columns: 'önë', '', '🦆'."),
        ("fp-no_columns", ("ticket_id", "body"), "no column 'ticket_id'. It has no columns."),
        ("dd-manyrowgroups", ("42", "body"), "no column 'body'"),
        ("dd-manyrowgroups", ("42", "42"), "'42' of {path} is Int32, not text"),
        ("pt-binary", ("foo", "foo"), "'foo' of {path} is Binary"),
        ("pt-nested_lists.snappy", ("b", "a"), "'a' of {path} is List(List(List(String))), not text"),
        ("fp-spark-empty-rg", ("id", "Date"), "'Date' of {path} is Date, not text"),
        ("pt-int96_from_spark", ("a", "a"), "'a' of {path} is Datetime"),
        ("dd-invalid", ("X1", "X1"), "not valid UTF-8"),
        ("dd-parquet_column_num_values_mismatch", ("n", "s"), "is damaged"),
        ("pt-bad-PARQUET-1481", ("ticket_id", "body"), "is damaged"),
        ("pt-encrypt_columns_and_footer", ("ticket_id", "body"), "is encrypted"),
        ("at-fuzz-8bytes", ("ticket_id", "body"), "not a Parquet file"),
    ],
)
def test_unusable_files_are_refused(tmp_path: Path, name: str, columns: tuple[str, str], words: str) -> None:
    path = CASES / f"{name}.parquet"
    message = refusal(path, tmp_path, id_column=columns[0], text_columns=columns[1:])
    assert words.format(path=path) in message


@needs_shared
def test_odd_but_usable_files_are_read(tmp_path: Path) -> None:
    silly = read(CASES / "dd-silly-names.parquet", tmp_path, id_column="önë", text_columns=("",))
    assert silly[1]["text"].to_list() == ["foo", "bar", "baz"]
    null_byte = read(CASES / "dd-nullbyte.parquet", tmp_path, id_column="42", text_columns=("hello world",))
    assert null_byte[1]["text"].to_list() == ["hello\ufffdworld"]


def test_a_strange_column_beside_the_text_passes_into_the_quarantine(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    years = pa.array([[-62_000_000_000], [4_000_000_000]]).flatten().cast(pa.timestamp("s"))  # years 5 and 2096
    table = pa.table({"ticket_id": ["a", "a"], "body": ["x", "y"], "when": years})
    pq.write_table(table, tmp_path / "input.parquet", use_deprecated_int96_timestamps=True)
    _, tickets, quarantine = read(tmp_path / "input.parquet", tmp_path)
    assert len(tickets) == 1
    assert quarantine["when"].dt.year().to_list() == [2096]


@needs_shared
@pytest.mark.parametrize("path", sorted(SETS.glob("*.parquet")), ids=lambda path: path.name.split(".")[0])
def test_every_shared_set_is_read_without_a_loss(tmp_path: Path, path: Path) -> None:
    summary, tickets, _ = read(path, tmp_path)
    assert summary.tickets == summary.rows == len(tickets)
    source = pl.read_parquet(path)
    assert_frame_equal(tickets.select("ticket_id"), source.select("ticket_id"))
    assert (
        summary.text_characters["max"] <= (source["subject"].fill_null("") + source["body"]).str.len_chars().max() + 1
    )


PEAK_OF_READING = """
import resource, sys
from pathlib import Path
from ticket_engine.reading import read_tickets
read_tickets(sys.argv[1], Path(sys.argv[2]), id_column="ticket_id", text_columns=("body",), limit=int(sys.argv[3]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_texts(tmp_path: Path) -> None:
    part = pl.DataFrame({"row": range(100_000)}).select(
        ticket_id=pl.col("row"), body=pl.format("{} ", pl.col("row")) + pl.lit("a sentence of a ticket " * 50)
    )
    (tmp_path / "in").mkdir()
    for index in range(8):  # 100,000 texts of 1.2 kB a file
        shifted = part.with_columns(pl.col("ticket_id") + index * 100_000)
        shifted.write_parquet(tmp_path / "in" / f"{index}.parquet", row_group_size=50_000)
    peaks = []
    for limit in (200_000, 800_000):
        command = [sys.executable, "-c", PEAK_OF_READING, str(tmp_path / "in"), str(tmp_path), str(limit)]
        peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    assert peaks[1] - peaks[0] < 300  # megabytes; the 600,000 texts more are 700
