"""The pages of a run: numbers equal the inputs, nothing is fetched, and nothing from outside becomes markup."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import polars as pl
import pytest

from data_contracts.checks import check_predictions, check_tickets
from data_contracts.overview import write_overview
from ticket_engine.spot_check import compare
from ticket_engine.spot_sample import choose_sample

OUTSIDE = re.compile(r"""(?:src|href|url|action)\s*[=(]\s*["']?\s*(?:https?:)?//""", re.IGNORECASE)
LOADING_TAGS = {"script", "img", "iframe", "object", "embed", "video", "audio", "base", "form"}


class Page(HTMLParser):
    """Text by ``data-`` attribute, cells of each table row, tags, links and title of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.data: dict[tuple[str, str], str] = {}
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.ids: dict[str, str] = {}
        self.title = ""
        self._open: list[tuple[str, str]] = []
        self._tag = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self._tag = tag
        self._open = [(name, value) for name, value in attrs if name.startswith("data-") or name == "id"]
        if tag == "a":
            self.links.append(dict(attrs)["href"])
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        if tag == "table":
            self.rows.append([])

    def handle_data(self, data):
        text = " ".join(data.split())
        if self._tag == "title" and not self.title:
            self.title = text
        if text and self._open:
            self.data |= dict.fromkeys(self._open, text)
            self._open = []
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] = f"{self.rows[-1][-1]} {text}".strip()


def pages_of(run, *, checked=None) -> dict[str, Page]:
    incoming = check_tickets(run.folder, run.settings, run.summary)
    check_predictions(run.folder, run.settings, checked or run.checked, incoming, run.summary.rows)
    return {path.stem: Page(path) for path in (run.folder / "data_docs").iterdir()}


def test_the_overview_shows_the_numbers_of_the_run(finished_run):
    run = finished_run("cfpb_complaints", bad_rows=3)
    page = pages_of(run)["index"]
    counts = dict(run.predictions()["label"].value_counts().iter_rows())
    expected = {
        ("data-figure", "rows"): 1186,
        ("data-figure", "predictions"): 1181,
        ("data-figure", "quarantined"): 5,
        ("data-figure", "truncated"): int(pl.read_parquet(run.folder / "tokens.parquet")["is_truncated"].sum()),
        ("data-spot-check", "sampled"): run.checked.sampled,
        ("data-spot-check", "agreed"): run.checked.agreed,
        ("data-spot-check", "near_ties"): 0,
        ("data-spot-check", "disagreed"): 0,
    } | {("data-label", label): count for label, count in counts.items()}
    assert {key: int(page.data[key]) for key in expected} == expected
    assert page.title == "Support tickets of 2026-12-01"
    assert page.data["id", "verdict"] == "All contracts hold."
    assert f"{run.checked.upper_bound:.1%}" in (run.folder / "data_docs" / "index.html").read_text()


def test_the_details_show_every_expectation_in_words_with_what_was_found(finished_run):
    run = finished_run(bad_rows=3)
    pages = pages_of(run)
    outgoing = {cells[1]: cells[2] for cells in pages["predictions"].rows if len(cells) == 3}
    sentence = "Every input row must have exactly one outcome: a prediction, or a quarantine row with a reason."
    assert outgoing[sentence] == "1,520 of 1,520 have one outcome"
    agreement = next(found for words, found in outgoing.items() if words.startswith("The slow scorer must give"))
    assert f"{run.checked.agreed} of {run.checked.sampled} tickets got the same label" in agreement
    incoming = {cells[1]: cells[2] for cells in pages["tickets"].rows if len(cells) == 3}
    assert incoming["The share of rows in quarantine must be at most 50 % ."] == "0.33 %"
    assert incoming["The number of rows must be at least 1 and at most 1,000,000,000 ."] == "1,520"
    assert pages["predictions"].data["id", "verdict"] == "Holds: all 9 expectations hold."


def test_a_failed_expectation_is_shown_with_the_values_and_the_ids_that_break_it(finished_run):
    run = finished_run()
    frame = run.predictions()
    lost = frame["ticket_id"][7]
    pages = pages_of(run.with_predictions(frame.filter(pl.col("ticket_id") != lost)))
    assert pages["index"].data["id", "verdict"] == "Not published: 1 expectation failed."
    (row,) = [cells for cells in pages["index"].rows if cells and cells[0] == "failed"]
    assert row[1] == "coverage"
    assert lost in row[3]
    details = [
        cells for cells in pages["predictions"].rows if any("1,519 of 1,520 have one outcome" in c for c in cells)
    ]
    assert details
    assert ["lost", "1"] in pages["predictions"].rows


def test_drift_is_shown_with_the_shares_of_both_runs(finished_run, publish_before):
    run = finished_run()
    labels = run.predictions()["log_probs"].struct.fields
    publish_before(run, dict.fromkeys(labels, 0) | {labels[0]: 500})
    pages = pages_of(run)
    share = (run.predictions()["label"] == labels[0]).mean()
    assert [labels[0], "100 %", f"{100 * share:.2f} %"] in pages["predictions"].rows
    assert "warning" in [cells[0] for cells in pages["index"].rows if cells]


def test_no_page_loads_anything_and_every_link_leads_to_a_page_of_the_folder(finished_run):
    run = finished_run(bad_rows=3)
    pages = pages_of(run)
    assert set(pages) == {"index", "tickets", "predictions"}
    for name, page in pages.items():
        text = (run.folder / "data_docs" / f"{name}.html").read_text(encoding="utf-8")
        assert not OUTSIDE.search(text)
        assert not page.tags & LOADING_TAGS
        assert page.links
        for link in page.links:
            assert (run.folder / "data_docs" / link).is_file()


def test_no_ticket_text_reaches_a_page(finished_run):
    run = finished_run("cfpb_complaints", bad_rows=3)
    pages_of(run)
    texts = pl.read_parquet(run.folder / "tickets.parquet").filter(pl.col("text").str.len_chars() > 30)["text"]
    written = "".join(path.read_text(encoding="utf-8") for path in (run.folder / "data_docs").iterdir())
    assert not [text for text in texts if text[:30] in written]


@pytest.mark.parametrize("damage", ["doubled", "label"])
def test_markup_in_ids_and_labels_is_shown_and_not_run(finished_run, damage):
    run = finished_run()
    attack = "<script>alert(1)</script>"
    tickets = pl.read_parquet(run.folder / "tickets.parquet")
    renamed = {tickets["ticket_id"][row]: f"{attack}{row}" for row in range(50)}
    for name in ("tickets", "tokens", "predictions", "quarantine"):
        path = run.folder / f"{name}.parquet"
        pl.read_parquet(path).with_columns(pl.col("ticket_id").replace(renamed)).write_parquet(path)
    frame = run.predictions()
    if damage == "doubled":
        rewritten = pl.read_parquet(run.folder / "tickets.parquet")
        pl.concat([rewritten, rewritten[:1]]).write_parquet(run.folder / "tickets.parquet")
    else:
        run.with_predictions(frame.with_columns(pl.lit(attack).alias("label")))
    pages = pages_of(run)
    for name, page in pages.items():
        assert "script" not in page.tags
        assert attack not in (run.folder / "data_docs" / f"{name}.html").read_text(encoding="utf-8")
    shown = "tickets" if damage == "doubled" else "predictions"
    assert "&lt;script&gt;" in (run.folder / "data_docs" / f"{shown}.html").read_text(encoding="utf-8")


def test_a_disagreeing_ticket_is_named_on_the_overview(finished_run, reference_answers):
    run = finished_run()
    sample = choose_sample(run.predictions(), 32, 0)
    page = pages_of(run, checked=compare(reference_answers(sample, wrong=[0]), 1e-4, 0))["index"]
    assert page.data["data-spot-check", "disagreed"] == "1"
    (row,) = [cells for cells in page.rows if cells and cells[0] == "failed"]
    assert sample["ticket_id"][0] in row[3]


def test_the_overview_of_a_run_refused_at_its_input_has_no_labels(finished_run):
    run = finished_run().with_settings(contract_parameters={"min_rows": 9999})
    report = check_tickets(run.folder, run.settings, run.summary)
    page = Page(run.folder / "data_docs" / "index.html")
    assert page.data["id", "verdict"] == "Not published: 1 expectation failed."
    assert not [key for key in page.data if key[0] == "data-label"]
    write_overview(run.folder, "2026-12-02", [replace(report, expectations=report.expectations[:1])])
    assert Page(run.folder / "data_docs" / "index.html").data["id", "verdict"] == "All contracts hold."
