"""Data Docs that need no network, and the page that leads to them."""

import html
import re
from pathlib import Path

from data_contracts.reports import DOCS_FOLDER, ContractReport

_OUTSIDE = re.compile(
    r"<link\b[^>]*\bhref=[\"']https?://[^>]*>"
    r"|<script\b[^>]*\bsrc=[\"']https?://[^>]*>\s*</script>"
    r"|<img\b[^>]*\bsrc=[\"']https?://[^>]*>"
    r"|<iframe\b.*?</iframe>",
    re.IGNORECASE | re.DOTALL,
)
_STYLE = """<style>
body{font-family:system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#222;line-height:1.45}
table{border-collapse:collapse;margin:.5rem 0;width:100%}th,td{border:1px solid #ccc;padding:.35rem .6rem;text-align:left;
vertical-align:top}th{background:#f2f4f7}nav ol{list-style:none;padding:0;display:flex;gap:1rem}.badge{background:#eef;
border-radius:.3rem;padding:0 .3rem}.failed,.text-danger{color:#b00020}.passed,.text-success{color:#127a2b}
#side-bar-container,.navbar-brand,.modal,#page-action-buttons,.btn{display:none}h1{font-size:1.5rem}h2{font-size:1.15rem}
</style>"""


def make_self_contained(folder: Path) -> None:
    """Take out of Great Expectations' pages all that a browser would fetch from elsewhere, and style them."""
    for path in folder.rglob("*.html"):
        text = _OUTSIDE.sub("", path.read_text(encoding="utf-8"))
        path.write_text(text.replace("</head>", _STYLE + "</head>", 1), encoding="utf-8")


def write_index(folder: Path, reports: list[ContractReport]) -> None:
    """Write ``data_docs/index.html``: every expectation with its verdict, and links to the full pages."""
    parts = ["<!doctype html><html lang=en><head><meta charset=utf-8><title>Contracts of this run</title>", _STYLE]
    parts.append("</head><body><h1>Contracts of this run</h1>")
    for report in reports:
        verdict = "holds" if report.passed else "does not hold: nothing was published"
        parts.append(
            f"<h2>{html.escape(report.stage)}: {verdict}</h2><table><tr><th>What is expected<th>Found<th>Verdict"
        )
        for item in report.expectations:
            word = "passed" if item.passed else ("warning" if item.severity == "warning" else "failed")
            ids = f" (such as {', '.join(map(str, item.example_ids[:5]))})" if item.example_ids else ""
            cells = [html.escape(item.name), html.escape(item.observed + ids), f"<span class={word}>{word}</span>"]
            parts.append("<tr>" + "".join(f"<td>{cell}" for cell in cells))
        parts.append(
            f"</table><p><a href='{html.escape(report.stage)}/index.html'>Full page of Great Expectations</a></p>"
        )
    (folder / DOCS_FOLDER / "index.html").write_text("\n".join([*parts, "</body></html>"]), encoding="utf-8")
