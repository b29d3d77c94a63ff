"""The command line, in process and on a tiny model: what comes out, and how errors are told."""

import json
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from data_contracts.checks import check_published
from ticket_engine.publish import read_manifest

CASES = Path(__file__).parents[3] / "shared" / "data" / "parquet-cases"
TICKETS = Path(__file__).parents[3] / "shared" / "data" / "tickets"
Run = Callable[..., tuple[int, str, str]]


def tree(folder: Path) -> dict[str, bytes]:
    """Names and contents of all files of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_run_publishes_predictions_quarantine_manifest_and_pages(
    run_cli: Run, tickets_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    code, printed, errors = run_cli(input=tickets_file, output=output)
    assert (code, errors) == (0, "")
    rows = pl.read_parquet(tickets_file)
    predictions = pl.read_parquet(output / "predictions.parquet")
    manifest = json.loads((output / "manifest.json").read_text())
    quarantine = pl.read_parquet(output / "quarantine.parquet")
    assert len(predictions) + len(quarantine) == len(rows) == manifest["rows"]["input"]
    kept = rows.filter(pl.col("ticket_id").is_in(predictions["ticket_id"].implode()))
    assert predictions["ticket_id"].to_list() == kept["ticket_id"].to_list()
    assert manifest["spot_check"]["agreement"] == 1.0
    assert manifest["spot_check"]["float32_sampled"] == 0  # the run is in float32
    assert manifest["contracts"]["predictions"]["passed"] is True
    assert (output / "data_docs" / "index.html").is_file()
    assert f"{len(rows)} read" in printed
    assert not (tmp_path / ".out.work").exists()


def test_a_second_run_over_the_same_tickets_computes_nothing_and_publishes_the_same(
    run_cli: Run, tickets_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    run_cli(input=tickets_file, output=output)
    before = pl.read_parquet(output / "predictions.parquet").drop("bucket_index")
    code, printed, _ = run_cli(input=tickets_file, output=output)
    manifest = json.loads((output / "manifest.json").read_text())
    assert code == 0
    assert "nothing to compute" in printed
    assert manifest["plan"]["batches"] == 0
    assert pl.read_parquet(output / "predictions.parquet").drop("bucket_index").equals(before)


def test_new_tickets_alone_are_computed_the_next_night(
    run_cli: Run, sample_tickets: pl.DataFrame, tmp_path: Path
) -> None:
    first, second, output = tmp_path / "a.parquet", tmp_path / "b.parquet", tmp_path / "out"
    sample_tickets.write_parquet(first)
    more = sample_tickets.head(1).with_columns(ticket_id=pl.lit("new"), body=pl.lit("A wholly new question."))
    pl.concat([sample_tickets.with_columns(pl.col("ticket_id").cast(pl.String)), more]).write_parquet(second)
    run_cli(input=first, output=output)
    run_cli(input=second, output=output)
    plan = json.loads((output / "manifest.json").read_text())["plan"]
    assert plan["distinct"] - plan["stored"] == 1


@pytest.mark.parametrize("execution", ["packed", "padded", "sequential"])
def test_every_execution_gives_the_same_labels(
    run_cli: Run, tickets_file: Path, tmp_path: Path, execution: str
) -> None:
    run_cli(input=tickets_file, output=tmp_path / "reference", execution="sequential")
    code, _, errors = run_cli(input=tickets_file, output=tmp_path / "out", execution=execution, batch_size=3)
    assert (code, errors) == (0, "")
    mine = pl.read_parquet(tmp_path / "out" / "predictions.parquet")
    slow = pl.read_parquet(tmp_path / "reference" / "predictions.parquet")
    assert mine["label"].to_list() == slow["label"].to_list()


def test_check_finds_a_changed_file(run_cli: Run, tickets_file: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    from flows import cli

    output = tmp_path / "out"
    run_cli(input=tickets_file, output=output)
    monkeypatch.setattr("sys.argv", ["classify_tickets", "check", str(output)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    capsys.readouterr()
    damaged = bytearray((output / "predictions.parquet").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (output / "predictions.parquet").write_bytes(damaged)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 3
    assert "predictions.parquet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"input": "nowhere.parquet"}, "nowhere.parquet"),
        ({"labels": "nowhere.yaml"}, "nowhere.yaml"),
        ({"model": "./nowhere"}, "smollm2-135m"),
        ({"id_column": "number"}, "number"),
        ({"text_columns": "message"}, "message"),
        ({"execution": "fast"}, "execution"),
        ({"batch_size": 0}, "batch_size"),
        ({"max_ticket_tokens": 100000}, "positions"),
        ({"contract_parameter": "max_moon_phase=1"}, "max_moon_phase"),
        ({"contract_parameter": "max_quarantine_rate=nan"}, "max_quarantine_rate"),
        ({"contract_parameter": "max_quarantine_rate"}, "max_quarantine_rate"),
        ({"run_date": "2026-02-31"}, "2026-02-31"),
        ({"input": "tickets-{moon}.parquet"}, "run_date"),
    ],
)
def test_what_a_user_can_put_right_is_told_in_two_lines_with_exit_code_2(
    run_cli: Run, tickets_file: Path, tmp_path: Path, options: dict, words: str
) -> None:
    output = tmp_path / "out"
    code, _, errors = run_cli(**({"input": tickets_file, "output": output} | options))
    assert code == 2
    assert words in errors
    assert len(errors.strip().splitlines()) <= 2
    assert "Traceback" not in errors
    assert not output.exists()


def test_a_foreign_folder_is_never_replaced(run_cli: Run, tickets_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "thesis.txt").write_text("mine")
    code, _, errors = run_cli(input=tickets_file, output=output)
    assert code == 2
    assert "was not made by classify-tickets" in errors
    assert tree(output) == {"thesis.txt": b"mine"}


def test_an_empty_table_publishes_an_empty_valid_output(
    run_cli: Run, sample_tickets: pl.DataFrame, tmp_path: Path
) -> None:
    source, output = tmp_path / "empty.parquet", tmp_path / "out"
    sample_tickets.clear().write_parquet(source)
    code, _, errors = run_cli(input=source, output=output, contract_parameter="min_rows=0")
    assert (code, errors) == (0, "")
    predictions = pl.read_parquet(output / "predictions.parquet")
    assert len(predictions) == 0
    assert predictions.schema["ticket_id"] == sample_tickets.schema["ticket_id"]
    assert json.loads((output / "manifest.json").read_text())["rows"]["predictions"] == 0


@pytest.mark.skipif(not CASES.is_dir(), reason="the shared Parquet cases are not here")
@pytest.mark.parametrize("path", sorted(CASES.glob("*.parquet")), ids=lambda path: path.stem)
def test_no_parquet_case_gives_a_traceback_or_a_partial_output(run_cli: Run, tmp_path: Path, path: Path) -> None:
    output = tmp_path / "out"
    code, _, errors = run_cli(input=path, output=output)
    assert code == 2
    assert len(errors.strip().splitlines()) <= 2
    assert path.name in errors or "column" in errors
    assert not output.exists()


@pytest.mark.skipif(not TICKETS.is_dir(), reason="the shared tickets are not here")
@pytest.mark.parametrize("name", sorted(path.name.split(".")[0] for path in TICKETS.glob("*.dev.parquet")))
def test_every_shared_set_of_tickets_goes_through(run_cli: Run, tmp_path: Path, name: str) -> None:
    output = tmp_path / "out"
    code, _, errors = run_cli(
        input=TICKETS / f"{name}.dev.parquet",
        labels=TICKETS / f"{name}.labels.yaml",
        output=output,
        limit=60,
        max_ticket_tokens=64,
        spot_check=12,
    )
    assert (code, errors) == (0, "")
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["rows"]["predictions"] == 60


@pytest.mark.parametrize("name", ["reason", "^.*$", "*", "row", "text"])
def test_an_id_column_of_any_name_is_published_and_checked_under_it(
    run_cli: Run, sample_tickets: pl.DataFrame, tmp_path: Path, name: str
) -> None:
    table = sample_tickets.rename({"ticket_id": name}).with_columns(
        body=pl.when(pl.int_range(pl.len()) > 0).then("body"), subject=pl.lit(None, pl.String)
    )
    table.write_parquet(tmp_path / "tickets.parquet")
    code, _, errors = run_cli(input=tmp_path / "tickets.parquet", output=tmp_path / "out", id_column=name)
    assert (code, errors) == (0, "")
    assert pl.read_parquet(tmp_path / "out" / "predictions.parquet")[name].to_list() == table[name].to_list()[1:]
    assert check_published(tmp_path / "out", read_manifest(tmp_path / "out")) == []


@pytest.mark.parametrize("name", ["stage", "needs_review", "label"])
def test_an_id_column_named_like_a_column_of_the_results_is_refused_before_any_work(
    run_cli: Run, sample_tickets: pl.DataFrame, tmp_path: Path, name: str
) -> None:
    sample_tickets.rename({"ticket_id": name}).write_parquet(tmp_path / "tickets.parquet")
    code, _, errors = run_cli(input=tmp_path / "tickets.parquet", output=tmp_path / "out", id_column=name)
    assert code == 2
    assert f"The id column cannot be named {name!r}" in errors
    assert len(errors.strip().splitlines()) == 1
