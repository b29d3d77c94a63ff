"""`results.json` as a page: number, machine, commit, command."""

import platform
import statistics
from pathlib import Path

BEGIN, END = "<!-- speed: begin -->", "<!-- speed: end -->"


def write_report(results: dict, path: Path) -> None:
    """Write the speed part of ``results.md``; what else stands on the page stays."""
    old = path.read_text(encoding="utf-8") if path.is_file() else "# Benchmarks\n"
    before, _, rest = old.partition(BEGIN)
    after = rest.partition(END)[2]
    path.write_text(f"{before.rstrip()}\n\n{BEGIN}\n{_speed(results)}\n{END}\n{after.lstrip()}", encoding="utf-8")


def _speed(results: dict) -> str:
    runs = results["runs"]
    lines = [
        "## Speed of the engine",
        "",
        f"`make bench`, commit {results['commit']}, {platform.machine()}, {results['processors']} processors, PyTorch "
        f"{results['torch']}. Medians of the ratios of alternated runs in one process, least to largest in brackets; "
        "share is that of the matrix-product peak measured between the runs.",
        "",
    ]
    for model, work in dict.fromkeys((run["model"], run["work"]) for run in runs):
        picked = [run for run in runs if (run["model"], run["work"]) == (model, work)]
        lines += [f"### {model}, {work}", "", "| row | number format | tickets | times one by one | share of peak |"]
        lines.append("|---|---|---:|---:|---:|")
        for row, dtype in dict.fromkeys((run["row"], run["dtype"]) for run in picked):
            mine = [run for run in picked if (run["row"], run["dtype"]) == (row, dtype)]
            base = [run for run in picked if (run["row"], run["dtype"]) == ("one by one", dtype)]
            values = [b["seconds"] / m["seconds"] for b, m in zip(base, mine, strict=True)]
            share = statistics.median(run["share_of_peak"] for run in mine)
            lines.append(
                f"| {row} | {dtype} | {mine[0]['tickets']} | {statistics.median(values):.2f} "
                f"[{min(values):.2f} to {max(values):.2f}] | {share:.2f} |"
            )
        lines.append("")
    lines += ["### Padding overhead, 600 tickets", "", "| plan | padded tokens / real tokens - 1 |", "|---|---:|"]
    lines += [f"| {name} | {value:.1%} |" for name, value in results["padding"].items()]
    lines += ["", "![Lengths and batches](batches.png)", "", "![Speed](speed.png)"]
    return "\n".join(lines)
