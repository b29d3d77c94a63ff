"""``data_docs/index.html``: a run and its contracts on one page, for people who run a support desk."""

from html import escape
from pathlib import Path

from data_contracts.reports import DOCS_FOLDER, ContractReport

_STYLE = Path(__file__).parent / "templates" / "pages.css"
_NAMES = {"tickets": "What came in", "predictions": "What goes out"}


def write_overview(folder: Path, run_date: str, reports: list[ContractReport]) -> None:
    """Write the page. Each figure stands in an element with ``data-figure``, so that it can be read back.

    Args:
        folder: The run's folder; ``data_docs/index.html`` is written below it.
        run_date: Of the run.
        reports: Of the input contract, and of the output contract if it ran.
    """
    parameters = {name: value for report in reports for name, value in report.parameters.items()}
    failed = [item for report in reports for item in report.failed]
    heading = f"Support tickets of {run_date}"
    if failed:
        verdict = f"Not published: {_plural(len(failed), 'expectation')} failed."
    else:
        warned = sum(len(report.warnings) for report in reports)
        verdict = f"All contracts hold, with {_plural(warned, 'warning')}." if warned else "All contracts hold."
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<title>{escape(heading)}</title><link rel="icon" href="data:,">',
        f"<style>{_STYLE.read_text(encoding='utf-8')}</style></head><body>",
        f"<h1>{escape(heading)}</h1>",
        f'<p id="verdict" class="{"failed" if failed else "passed"}">{verdict}</p>',
        _figures(parameters),
        *[_contract(report) for report in reports],
        _labels(parameters.get("label_counts") or {}),
        _spot_check(parameters.get("spot_check") or {}),
        "</body></html>\n",
    ]
    (folder / DOCS_FOLDER).mkdir(parents=True, exist_ok=True)
    (folder / DOCS_FOLDER / "index.html").write_text("\n".join(parts), encoding="utf-8")


def _figures(parameters: dict) -> str:
    words = {
        "rows": "Rows in the input",
        "predictions": "Tickets labelled",
        "quarantined": "Rows in quarantine",
        "truncated": "Tickets cut to the longest allowed length",
    }
    rows = [
        f'<tr><td>{text}<td class="number" data-figure="{name}">{parameters[name]}'
        for name, text in words.items()
        if parameters.get(name) is not None
    ]
    return f"<h2>The run</h2><table>{''.join(rows)}</table>"


def _contract(report: ContractReport) -> str:
    rows = []
    for item in report.expectations:
        found = item.observed
        if item.example_ids:
            found += f" (ids such as {', '.join(map(str, item.example_ids[:5]))})"
        cells = [f'<span class="{item.verdict}">{item.verdict}</span>', *map(escape, (item.name, item.expected, found))]
        rows.append(f'<tr data-expectation="{escape(item.name)}">' + "".join(f"<td>{cell}" for cell in cells))
    name = _NAMES.get(report.stage, report.stage)
    link = f'<p><a href="{escape(report.stage)}.html">Details of this contract</a></p>'
    return (
        f'<h2>{escape(name)}</h2><table id="contract-{escape(report.stage)}">'
        f"<tr><th>Verdict<th>Name<th>What is expected<th>What was found{''.join(rows)}</table>{link}"
    )


def _labels(counts: dict[str, int]) -> str:
    total = sum(counts.values())
    if not total:
        return ""
    rows = [
        f'<tr><td>{escape(label)}<td class="number" data-label="{escape(label)}">{count}'
        f'<td class="number">{count / total:.1%}<td style="width:50%"><span class="bar" '
        f'style="width:{100 * count / total:.1f}%"></span>'
        for label, count in sorted(counts.items(), key=lambda item: -item[1])
    ]
    head = '<tr><th>Label<th class="number">Tickets<th class="number">Share<th>'
    return f'<h2>Labels</h2><table id="labels">{head}{"".join(rows)}</table>'


def _spot_check(check: dict) -> str:
    if not check.get("sampled"):
        return "<h2>Spot check</h2><p>No ticket was scored again.</p>" if check else ""
    words = {
        "sampled": "Tickets scored again by the slow scorer",
        "agreed": "of these with the same label",
        "near_ties": "of these with two labels too close to call",
        "disagreed": "of these with another label",
    }
    if check.get("float32_sampled"):
        words |= {
            "float32_sampled": "Tickets scored in float32 too",
            "float32_disagreed": "of these with another label, beyond the rounding of the run's number format",
        }
    rows = [f'<tr><td>{text}<td class="number" data-spot-check="{name}">{check[name]}' for name, text in words.items()]
    bound = (
        f"<p>With {check['confidence']:.0%} confidence at most <b>{check['upper_bound']:.1%}</b> of all labels differ "
        f"from the slow scorer's. This rests on the {check['drawn']} tickets that were drawn by chance.</p>"
    )
    return f'<h2>Spot check</h2><table id="spot-check">{"".join(rows)}</table>{bound}'


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
