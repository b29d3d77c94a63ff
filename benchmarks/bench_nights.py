"""What a night costs around the model: `python -m benchmarks.bench_nights`.

Generated tickets go through the real flow on a real Prefect server with a fresh home, with the embedded model's
tokenizer and a tiny random model, so that what is not the model shows. Each size runs two ways in turn, in processes
of their own: the tasks' functions as plain calls (`bare_night`), and the flow. Orchestration is what the flow run
takes longer, from its start to its end on the server. Of the flow's process the memory is sampled, and a reader opens
the output all the while. Adds ``nights`` to ``results.json`` and a part to ``results.md``.
"""

import json
import platform
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.bench_tables import write_table
from benchmarks.night_watch import FlowServer, Reader, watch_memory
from benchmarks.report import replace_part

HERE = Path(__file__).parent
ROOT = HERE.parent
LABELS = ROOT / "samples" / "labels.yaml"
SIZES = (600, 10_000, 100_000)
SETTLING_ROWS = 64  # a first small run, so that the reader has something to read and all code is compiled


def make_model(folder: Path) -> None:
    """A random Llama of two narrow layers with the embedded model's tokenizer, written to ``folder``."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from ticket_engine.models import find_model, load_tokenizer
    from ticket_engine.settings import EMBEDDED_MODEL

    tokenizer = load_tokenizer(find_model(EMBEDDED_MODEL))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, 0.0, 0.25)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def settings_of(folder: Path, rows: int, name: str) -> dict:
    """Settings of a run over ``rows`` tickets with an output and a store of the way's own name."""
    return {
        "input": str(folder / f"{rows}.parquet"),
        "output": str(folder / name / "out"),
        "store": str(folder / name / f"store-{rows}"),
        "labels": str(LABELS),
        "model": str(folder / "model"),
        "dtype": "float32",
        "threads": 1,
        "workers": 2,
    }


def measure_bare(folder: Path, rows: int, environment: dict[str, str]) -> float:
    """Seconds of the same work as plain calls."""
    path = folder / "bare.json"
    path.write_text(json.dumps(settings_of(folder, rows, "bare")))
    command = [sys.executable, "-m", "benchmarks.bare_night", str(path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"The plain calls over {rows} tickets ended badly: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_flow(folder: Path, rows: int, server: FlowServer) -> dict:
    """One run of the command line: seconds, memory, task runs, and what a reader saw."""
    settings = settings_of(folder, rows, "flow")
    shutil.rmtree(settings["store"], ignore_errors=True)
    options = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    output = Path(settings["output"])
    reader = Reader(output)
    reader.start()
    errors = folder / "errors.txt"
    with errors.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.classify_tickets", *options],
            cwd=ROOT,
            env=server.environment,
            stdout=subprocess.DEVNULL,
            stderr=file,
        )
        samples = watch_memory(process)
    reader.stop()
    if process.returncode:
        raise SystemExit(f"The run over {rows} tickets ended with {process.returncode}: {errors.read_text()[-2000:]}")
    manifest = json.loads((output / "manifest.json").read_text())
    run, tasks = server.last_run()
    seconds = manifest["seconds"]
    return {
        "tickets": rows,
        "process_seconds": samples[-1][0] - samples[0][0],
        "flow_seconds": run["seconds"],
        "stage_seconds": seconds,
        "outside_stages_seconds": run["seconds"] - seconds["total"],
        "task_runs": len(tasks),
        "buckets": manifest["plan"]["buckets"],
        "memory": memory_by_stage(samples, tasks),
        "peak_memory": max(rss for _, rss in samples),
        "reader_looks": reader.looks,
        "reader_problems": reader.problems,
        "stderr_lines": len(errors.read_text().splitlines()),
        "store_bytes": size_of(Path(settings["store"])),
        "output_bytes": size_of(output),
    }


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def memory_by_stage(samples: list[tuple[float, int]], tasks: list[dict]) -> dict[str, int]:
    """Most resident bytes of the flow's process while each stage ran; classifying in four quarters of its time."""
    spans = {task["stage"]: (task["start"], task["end"]) for task in tasks if task["stage"] != "classify-bucket"}
    buckets = [task for task in tasks if task["stage"] == "classify-bucket"]
    if buckets:
        start, end = min(task["start"] for task in buckets), max(task["end"] for task in buckets)
        quarter = (end - start) / 4
        spans |= {f"classify {n + 1}/4": (start + n * quarter, start + (n + 1) * quarter) for n in range(4)}
    found = {}
    for stage, (start, end) in sorted(spans.items(), key=lambda item: item[1]):
        inside = [rss for moment, rss in samples if start <= moment <= end]
        if inside:
            found[stage] = max(inside)
    return found


def check_database(path: Path) -> dict:
    """What SQLite says about the server's database after the server has stopped, and its size in bytes."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
        (verdict,) = connection.execute("PRAGMA integrity_check").fetchone()
    return {"integrity_check": verdict, "bytes": path.stat().st_size}


def measure(folder: Path, sizes: list[int]) -> dict:
    """All sizes; plain calls and the flow in turn."""
    make_model(folder / "model")
    for rows in (SETTLING_ROWS, *sizes):
        write_table(folder / f"{rows}.parquet", rows)
    server = FlowServer(folder / "home")
    runs = []
    try:
        measure_flow(folder, SETTLING_ROWS, server)
        for rows in sizes:
            bare = measure_bare(folder, rows, server.environment)
            run = measure_flow(folder, rows, server)
            over = run["flow_seconds"] - bare
            runs.append(run | {"bare_seconds": bare, "orchestration_seconds": over})
            runs[-1]["orchestration_share"] = over / run["flow_seconds"]
            print({key: value for key, value in runs[-1].items() if key != "memory"}, flush=True)
    finally:
        server.stop()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    database = check_database(folder / "home" / "prefect.db")
    return {"commit": commit.stdout.strip(), "runs": runs, "database": database}


def write_report(results: dict) -> None:
    """The key ``nights`` of results.json and the part of results.md."""
    path = HERE / "results.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps(kept | {"nights": results}, indent=1) + "\n", encoding="utf-8")
    replace_part(HERE / "results.md", "nights", report(results))


def report(results: dict) -> str:
    """The part of the page."""
    runs, database = results["runs"], results["database"]
    lines = [
        "## A night around the model",
        "",
        f"`python -m benchmarks.bench_nights`, commit {results['commit']}, {platform.machine()}: generated tickets, the "
        "embedded model's tokenizer, a random model of two layers of width 32, the real flow on a Prefect server of its "
        "own. Plain calls: the tasks' functions without Prefect, in a process of their own. Orchestration: what the "
        "flow run takes longer than the plain calls, from start to end on the server. The process also needs time to "
        "import and to end. With a real model the seconds of orchestration stay and their share falls.",
        "",
        "| tickets | flow run, s | plain calls, s | orchestration, s | share of the flow run | whole process, s "
        "| task runs | peak memory, MB | reader's looks | incomplete sets seen |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {run['tickets']:,} | {run['flow_seconds']:.1f} | {run['bare_seconds']:.1f} "
        f"| {run['orchestration_seconds']:.1f} | {run['orchestration_share']:.1%} | {run['process_seconds']:.1f} "
        f"| {run['task_runs']} | {run['peak_memory'] / 2**20:.0f} | {run['reader_looks']} "
        f"| {len(run['reader_problems'])} |"
        for run in runs
    ]
    stages = list(runs[-1]["memory"])
    lines += ["", "Most memory (MB) while a stage ran; classifying in quarters of its time:", ""]
    lines += ["| tickets | " + " | ".join(stages) + " |", "|---:|" + "---:|" * len(stages)]
    for run in runs:
        cells = (f"{run['memory'][stage] / 2**20:.0f}" if stage in run["memory"] else "-" for stage in stages)
        lines.append(f"| {run['tickets']:,} | " + " | ".join(cells) + " |")
    verdict = f"integrity check: {database['integrity_check']}, {database['bytes'] / 2**20:.1f} MB"
    lines += ["", f"The server's database after these {len(runs) + 1} flow runs: {verdict}."]
    return "\n".join(lines)


def main(
    sizes: Annotated[str, typer.Option(help="Numbers of tickets.")] = ",".join(map(str, SIZES)),
    keep: Annotated[bool, typer.Option(help="Write results.json and results.md.")] = True,
) -> None:
    """Measure every size, both ways."""
    with tempfile.TemporaryDirectory() as name:
        results = measure(Path(name), [int(size) for size in sizes.split(",")])
    print(report(results))
    if keep:
        write_report(results)


if __name__ == "__main__":
    typer.run(main)
