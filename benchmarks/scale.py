"""What a very large table needs, calculated from what was measured: `python -m benchmarks.scale`.

Reads ``results.json`` (speed, nights, tables, stages) and writes the calculated part of ``docs/scale.md``. Nothing is
timed here; other hardware, prices and nights are options.
"""

import json
import statistics
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.report import replace_part

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "scale.md"
EMBEDDED, WORK, ROW = "smollm2-135m", "prefix of 120", "ours packed + prefix"
ONCE = ("read", "tokenize", "check_tickets", "find_scored", "bucket", "gather", "check_predictions", "write")


def tickets_a_core_second(results: dict) -> float:
    """Median over rounds of tickets a second and processor, packed with a prefix, bfloat16."""
    runs = [
        run
        for run in results["runs"]
        if (run["model"], run["work"], run["row"], run["dtype"]) == (EMBEDDED, WORK, ROW, "bfloat16")
    ]
    return statistics.median(run["tickets"] / run["seconds"] / (run["threads"] * run["workers"]) for run in runs)


def around_the_model(results: dict) -> dict[str, float]:
    """Seconds a million tickets of the stages that one process does, from the largest measured night."""
    night = max(results["nights"]["runs"], key=lambda run: run["tickets"])
    millions = night["tickets"] / 1e6
    return {name: seconds / millions for name, seconds in night["stage_seconds"].items() if name in ONCE}


def calculate(results: dict, tickets: float, hours: float, price: float) -> list[tuple[str, str]]:
    """Rows of the table: what, and how much.

    Args:
        results: Content of ``results.json``.
        tickets: Of one night.
        hours: That the night has.
        price: Of one processor for one hour, in any currency.
    """
    rate = tickets_a_core_second(results)
    share = results["stages"]["full depth in stages"]["share_of_full_depth_seconds"]
    night = max(results["nights"]["runs"], key=lambda run: run["tickets"])
    millions, seconds = tickets / 1e6, hours * 3600
    around = around_the_model(results)
    serial = sum(around.values())
    memory = (night["peak_memory"] - results["nights"]["runs"][0]["peak_memory"]) / night["tickets"]
    rows = [
        ("tickets a second that the night asks for", f"{tickets / seconds:,.0f}"),
        ("tickets a second and processor, every ticket through the whole model", f"{rate:.1f}"),
        ("processors for the passes, whole model", f"{tickets / seconds / rate:,.0f}"),
        ("share of that time with a fitted head in stages", f"{share:.0%}"),
        ("processors for the passes, head in stages", f"{tickets / seconds / rate * share:,.0f}"),
        ("around the model, one process, seconds a million tickets", f"{serial:,.0f}"),
        ("  of these the most: " + max(around, key=around.get), f"{max(around.values()):,.0f}"),
        ("around the model, one flow run for all, hours", f"{serial * millions / 3600:.1f}"),
        ("memory beyond the model, GB a million tickets", f"{memory * 1e6 / 2**30:.2f}"),
        ("memory beyond the model, one flow run for all, GB", f"{memory * tickets / 2**30:,.0f}"),
        ("store of scored tickets, GB", f"{night['store_bytes'] / night['tickets'] * tickets / 2**30:,.0f}"),
        ("published files, GB", f"{night['output_bytes'] / night['tickets'] * tickets / 2**30:,.0f}"),
    ]
    for name, part in (("whole model", 1.0), ("head in stages", share)):
        hours_a_million = (1e6 / rate * part + serial) / 3600
        rows.append((f"processor hours a million tickets, {name}", f"{hours_a_million:,.1f}"))
        rows.append(
            (f"cost a million tickets at {price} an hour and processor, {name}", f"{hours_a_million * price:,.2f}")
        )
    return rows


def main(
    tickets: Annotated[float, typer.Option(help="Of one night.")] = 100e6,
    hours: Annotated[float, typer.Option(help="That the night has.")] = 8,
    price: Annotated[float, typer.Option(help="Of a processor for an hour; look yours up.")] = 0.04,
    write: Annotated[bool, typer.Option("--write/--no-write", help="Put the table into docs/scale.md.")] = False,
) -> None:
    """Print the calculation."""
    results = json.loads((HERE / "results.json").read_text(encoding="utf-8"))
    lines = [f"{tickets:,.0f} tickets in {hours:g} hours, from the figures of commit {results['commit']}:", ""]
    lines += ["| what | how much |", "|---|---:|"]
    lines += [f"| {what} | {value} |" for what, value in calculate(results, tickets, hours, price)]
    print("\n".join(lines))
    if write:
        replace_part(PAGE, "scale", "\n".join(lines))


if __name__ == "__main__":
    typer.run(main)
