"""A published folder is checked again from its manifest alone."""

import json
import shutil
from pathlib import Path

import polars as pl
import pytest

from data_contracts.checks import check_predictions, check_published, check_tickets
from ticket_engine.publish import read_manifest, write_manifest
from ticket_engine.schemas import PREDICTIONS_FILE, QUARANTINE_FILE


@pytest.fixture
def published(finished_run, tmp_path: Path) -> Path:
    """A published folder with 5 rows in quarantine."""
    run = finished_run(bad_rows=3)
    incoming = check_tickets(run.folder, run.settings, run.summary)
    report = check_predictions(run.folder, run.settings, run.checked, incoming, run.summary.rows)
    output = tmp_path / "published"
    output.mkdir()
    for name in (PREDICTIONS_FILE, QUARANTINE_FILE):
        shutil.copy(run.folder / name, output / name)
    manifest = {
        "rows": {"input": run.summary.rows},
        "labels": report.parameters["label_counts"],
        "settings": run.settings.model_dump(mode="json"),
        "contracts": {"tickets": incoming.summary(), "predictions": report.summary()},
    }
    write_manifest(output, manifest)
    return output


def rewrite(path: Path, frame: pl.DataFrame) -> None:
    frame.write_parquet(path)


def test_an_untouched_folder_holds_its_contract(published):
    assert check_published(published, read_manifest(published)) == []


def test_a_lost_row_a_doubled_row_and_a_foreign_label_are_told(published):
    path = published / PREDICTIONS_FILE
    whole = pl.read_parquet(path)
    rewrite(path, whole[1:])
    assert any(
        "1514 predictions and 5 rows in quarantine of 1520" in p
        for p in check_published(published, read_manifest(published))
    )
    rewrite(path, pl.concat([whole[1:], whole[-1:]]))
    assert check_published(published, read_manifest(published))[0].startswith("coverage: ")
    rewrite(path, whole.with_columns(pl.lit("weather").alias("label")))
    problems = check_published(published, read_manifest(published))
    assert problems[0].startswith("known labels: Every label is one of the labels file. Found: 1,515 of 1,520 rows")
    assert "the manifest counts other labels than the predictions hold" in problems


def test_a_row_that_left_quarantine_is_told(published):
    path = published / QUARANTINE_FILE
    rewrite(path, pl.read_parquet(path)[1:])
    problems = check_published(published, read_manifest(published))
    assert problems == ["1515 predictions and 4 rows in quarantine of 1520 input rows"]


def test_the_thresholds_of_the_run_are_judged_and_not_those_of_today(published):
    manifest = json.loads((published / "manifest.json").read_text(encoding="utf-8"))
    manifest["contracts"]["predictions"]["parameters"]["max_label_share"] = 0.05
    assert [p.split(":")[0] for p in check_published(published, manifest)] == ["largest label share"]


def test_a_manifest_without_a_contract_is_told(published):
    manifest = read_manifest(published)
    del manifest["contracts"]
    assert check_published(published, manifest) == ["the manifest holds no output contract"]
