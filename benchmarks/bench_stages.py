"""What deciding early saves: `python -m benchmarks.bench_stages`, after `bench_labels`.

For each set a head is fitted on 500 labelled tickets; the same test tickets are labelled by the text
alone, in stages, always at full depth, and by the model's own label scores, one way after the other in
one process, several rounds. Adds keys to ``results.json``, a part to ``results.md`` and ``stages.png``.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from platformdirs import user_cache_path

from benchmarks.bench_labels import IDENTITY, MAX_TOKENS, TICKETS, TicketSet, load_set, split
from benchmarks.report import replace_part
from ticket_engine.engine import Engine
from ticket_engine.engine_spec import TOKENIZER_FILE
from ticket_engine.fitting_features import count_layers
from ticket_engine.head_designs import NEVER
from ticket_engine.head_fitting import FitRule, fit_head
from ticket_engine.head_scoring import HeadScorer
from ticket_engine.heads import Head, decide_by_text
from ticket_engine.models import find_model, load_weights
from ticket_engine.preparation import prepare_engine
from ticket_engine.settings import EMBEDDED_MODEL, RunSettings
from ticket_engine.tokenization import load_ticket_tokenizer

HERE = Path(__file__).parent
ROWS, MOST_TEST, SKIPPED = 500, 150, "kaggle_random_labels"
Answer = Callable[[], np.ndarray]


def without_exits(head: Head) -> Head:
    """The same head, every ticket going to its last stage."""
    stages = [replace(stage, threshold=NEVER) for stage in head.stages[:-1]]
    return replace(head, stages=(*stages, head.stages[-1]))


def answers(engine: Engine, scorer: HeadScorer, ids: list[np.ndarray], texts: list[str]) -> np.ndarray:
    """Label index of each ticket: the text first, then the model for those that it leaves open."""
    log_probs, decided = decide_by_text(scorer.head, texts)
    given = log_probs.argmax(1)
    left = np.flatnonzero(~decided)
    left = left[np.argsort([-len(ids[row]) for row in left], kind="stable")]
    for rows in _batches(left, ids, engine):
        given[rows] = scorer.score([ids[row] for row in rows], [texts[row] for row in rows])[0].argmax(1)
    return given


def zero_shot(engine: Engine, ids: list[np.ndarray]) -> np.ndarray:
    """Label index of each ticket by the model's own label scores."""
    given = np.zeros(len(ids), dtype=np.int64)
    order = np.argsort([-len(row) for row in ids], kind="stable")
    for rows in _batches(order, ids, engine):
        given[rows] = engine.score([ids[row] for row in rows]).argmax(1)
    return given


def _batches(order: np.ndarray, ids: list[np.ndarray], engine: Engine) -> list[np.ndarray]:
    made: list[list[int]] = []
    used = 0
    for row in order:
        size = len(ids[row]) + engine.spec.extra_tokens
        if not made or used + size > engine.spec.token_budget:
            made.append([])
            used = 0
        made[-1].append(int(row))
        used += size
    return [np.array(rows) for rows in made]


def measure_set(ticket_set: TicketSet, model: str, layers: int, rounds: int, cache: Path) -> dict:
    """Seconds of every round and accuracy, by way."""
    settings = RunSettings(
        input="",
        labels=str(TICKETS / f"{ticket_set.name}.labels.yaml"),
        output=str(cache / "out"),
        model=model,
        execution="packed",
        max_ticket_tokens=MAX_TOKENS,
    )
    spec = prepare_engine(settings, cache)
    engine = Engine(spec, load_weights(Path(spec.model_folder), spec.dtype))
    test_rows, pool = split(ticket_set, 0)
    train = ticket_set.tickets.take(pool[:ROWS])
    heads = {
        depth: fit_head(
            train,
            ticket_set.label_rows,
            ticket_set.labels.names,
            rule=FitRule(layers=layers, depth=depth),
            identity=IDENTITY,
        )
        for depth in ("auto", layers)
    }
    test = ticket_set.tickets.take(test_rows[:MOST_TEST])
    tokenizer = load_ticket_tokenizer(
        cache / TOKENIZER_FILE, spec.prompt, max_ticket_tokens=MAX_TOKENS, truncate=spec.truncate
    )
    encoded = tokenizer.encode(test.texts)
    ids = np.split(encoded.flat, np.cumsum(encoded.lengths)[:-1])
    chosen, full = HeadScorer(engine, heads["auto"]), HeadScorer(engine, heads[layers])
    always = HeadScorer(engine, without_exits(heads[layers]))
    ways: dict[str, Answer] = {
        "always full depth": lambda: answers(engine, always, ids, test.texts),
        "full depth in stages": lambda: answers(engine, full, ids, test.texts),
        "chosen depth in stages": lambda: answers(engine, chosen, ids, test.texts),
        "text alone": lambda: decide_by_text(heads["auto"], test.texts)[0].argmax(1),
        "zero-shot": lambda: zero_shot(engine, ids),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    accuracy = {}
    for turn in range(rounds + 1):
        for way, answer in ways.items():
            started = time.perf_counter()
            given = answer()
            if turn:  # the first round warms up
                seconds[way].append(time.perf_counter() - started)
            accuracy[way] = float((given == test.label_indices).mean())
    return {"set": ticket_set.name, "tickets": len(ids), "seconds": seconds, "accuracy": accuracy}


def summarise(runs: list[dict]) -> dict:
    """Ratios of neighbouring runs against always going to full depth, medians a set, then means over sets."""
    ways = list(runs[0]["seconds"])
    base = "always full depth"
    times = {
        way: [
            statistics.median(b / s for b, s in zip(r["seconds"][base], r["seconds"][way], strict=True)) for r in runs
        ]
        for way in ways
    }
    shares = {way: float(np.mean([1 / value for value in values])) for way, values in times.items()}
    accuracy = {way: float(np.mean([run["accuracy"][way] for run in runs])) for way in ways}
    speeds = {
        way: float(np.mean([run["tickets"] / statistics.median(run["seconds"][way]) for run in runs])) for way in ways
    }
    near = [way for way in ways if way != "zero-shot" and accuracy[way] >= accuracy[base] - 0.005]
    best = min(near, key=lambda way: shares[way])
    return {
        "head_speedup_at_equal_accuracy": 1 / shares[best],
        "head_speedup_way": best,
        "stages": {
            way: {
                "accuracy": accuracy[way],
                "share_of_full_depth_seconds": shares[way],
                "tickets_a_second": speeds[way],
            }
            for way in ways
        },
    }


def draw(summary: dict, path: Path) -> None:
    """Accuracy against tickets a second, a point a way."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for way, values in summary["stages"].items():
        axes.scatter(values["tickets_a_second"], values["accuracy"])
        axes.annotate(
            way, (values["tickets_a_second"], values["accuracy"]), textcoords="offset points", xytext=(5, 5), fontsize=9
        )
    axes.set(xscale="log", xlabel="tickets a second (mean over sets)", ylabel="accuracy (mean over sets)")
    axes.set_title("500 labelled tickets a set, test tickets never seen")
    axes.margins(x=0.2, y=0.15)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def write_report(runs: list[dict], summary: dict) -> None:
    """Keys of results.json and the part of results.md; the rest of both stays."""
    path = HERE / "results.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps({**kept, **summary, "stage_runs": runs}, indent=1) + "\n", encoding="utf-8")
    ways = list(summary["stages"])
    lines = [
        "## What deciding early saves",
        "",
        "`python -m benchmarks.bench_stages`: heads on 500 labelled tickets (all there are in smaller sets), test tickets "
        "never seen, all ways in turn in one process. Times are shares of always going to full depth, medians of "
        "neighbouring runs.",
        "",
        "| set | tickets | " + " | ".join(f"{way}: accuracy, time" for way in ways) + " |",
        "|---|---:|" + "---:|" * len(ways),
    ]
    for run in runs:
        base = run["seconds"]["always full depth"]
        cells = []
        for way in ways:
            share = statistics.median(s / b for b, s in zip(base, run["seconds"][way], strict=True))
            cells.append(f"{run['accuracy'][way]:.3f}, {share:.2f}")
        lines.append(f"| {run['set']} | {run['tickets']} | " + " | ".join(cells) + " |")
    means = [f"{v['accuracy']:.3f}, {v['share_of_full_depth_seconds']:.2f}" for v in summary["stages"].values()]
    lines.append(f"| **mean of {len(runs)} sets** | | " + " | ".join(means) + " |")
    lines += [
        "",
        f"`head_speedup_at_equal_accuracy` {summary['head_speedup_at_equal_accuracy']:.1f} ({summary['head_speedup_way']}).",
        "",
        "![Accuracy against speed](stages.png)",
    ]
    replace_part(HERE / "results.md", "stages", "\n".join(lines))


def main(
    sets: Annotated[str, typer.Option(help="Names, comma separated; empty: all that can be learnt.")] = "",
    rounds: Annotated[int, typer.Option(help="Counted rounds.")] = 3,
    model: Annotated[str, typer.Option(help="As in classify-tickets.")] = EMBEDDED_MODEL,
) -> None:
    """Measure all sets, then write results.json, results.md and stages.png beside this file."""
    cache = user_cache_path("ticket-engine") / "bench-labels"
    found = sorted(path.name.split(".")[0] for path in TICKETS.glob("*.dev.parquet"))
    names = [name for name in sets.split(",") if name] or [name for name in found if name != SKIPPED]
    layers = count_layers(find_model(model))
    runs = []
    for name in names:
        runs.append(measure_set(load_set(name, model, cache), model, layers, rounds, cache))
        print(name, {way: round(value, 3) for way, value in runs[-1]["accuracy"].items()}, flush=True)
    summary = summarise(runs)
    draw(summary, HERE / "stages.png")
    write_report(runs, summary)


if __name__ == "__main__":
    typer.run(main)
