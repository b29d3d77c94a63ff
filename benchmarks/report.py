"""`results.json` as a page: number, machine, commit, command."""

import platform
import statistics
from pathlib import Path


def write_report(results: dict, path: Path) -> None:
    """Write the speed part of ``results.md``; what else stands on the page stays."""
    replace_part(path, "speed", _speed(results))


def replace_part(path: Path, name: str, text: str) -> None:
    """Put a part of a page between its marks, or at the end where there are none yet; the rest stays."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    old = path.read_text(encoding="utf-8") if path.is_file() else "# Benchmarks\n"
    before, _, rest = old.partition(begin)
    after = rest.partition(end)[2]
    path.write_text(f"{before.rstrip()}\n\n{begin}\n{text}\n{end}\n{after.lstrip()}", encoding="utf-8")


def speedups(base: list[dict], runs: list[dict]) -> list[float]:
    """How many times as fast as ``base`` each run is, paired by round."""
    seconds = {run["round"]: run["seconds"] for run in base}
    return [seconds[run["round"]] / run["seconds"] for run in runs]


def _speed(results: dict) -> str:
    runs = results["runs"]
    lines = [
        "## Speed of the engine",
        "",
        f"`make bench`, commit {results['commit']}, {platform.machine()}, {results['processors']} processors, PyTorch "
        f"{results['torch']}. Medians of the ratios of alternated runs in one process, least to largest in brackets; "
        "share is that of the matrix-product peak of the same number format, passes and threads, measured between the "
        "runs. Every row may use all processors: one pass on all of them where transformers is called as anybody would, "
        "the engine's own probed choice where it is ours.",
        "",
    ]
    for model, work in dict.fromkeys((run["model"], run["work"]) for run in runs):
        picked = [run for run in runs if (run["model"], run["work"]) == (model, work)]
        lines += [
            f"### {model}, {work}",
            "",
            "| row | number format | passes x threads | tickets | times one by one | share of peak |",
        ]
        lines.append("|---|---|---|---:|---:|---:|")
        for row, dtype in dict.fromkeys((run["row"], run["dtype"]) for run in picked):
            mine = [run for run in picked if (run["row"], run["dtype"]) == (row, dtype)]
            base = [run for run in picked if (run["row"], run["dtype"]) == ("one by one", dtype)]
            values = speedups(base, mine)
            share = statistics.median(run["share_of_peak"] for run in mine)
            lines.append(
                f"| {row} | {dtype} | {mine[0]['workers']} x {mine[0]['threads']} | {mine[0]['tickets']} | {statistics.median(values):.2f} "
                f"[{min(values):.2f} to {max(values):.2f}] | {share:.2f} |"
            )
        lines.append("")
    lines += ["### Padding overhead, 600 tickets", "", "| plan | padded tokens / real tokens - 1 |", "|---|---:|"]
    lines += [f"| {name} | {value:.1%} |" for name, value in results["padding"].items()]
    lines += ["", "![Lengths and batches](batches.png)", "", "![Speed](speed.png)"]
    return "\n".join(lines)
