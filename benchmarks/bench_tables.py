"""What a large table costs before the model runs: `python -m benchmarks.bench_tables`.

Tokenizing (with keys, lengths and the check of the prompt's borders) is alternated with the bare tokenizer
over the same texts; then the plan. Each size runs in a process of its own, whose peak memory is noted.
Adds ``tables`` to ``results.json`` and a part to ``results.md``.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import polars as pl
import psutil
import pyarrow.parquet as pq
import typer
from tokenizers import Tokenizer

from benchmarks.report import replace_part
from samples.sample_tickets import make_tickets
from ticket_engine import stages
from ticket_engine.bucketing import PlanRule, plan_batches
from ticket_engine.engine_spec import TOKENIZER_FILE
from ticket_engine.preparation import prepare_engine
from ticket_engine.reading import read_tickets
from ticket_engine.settings import EMBEDDED_MODEL, RunSettings
from ticket_engine.tokenization import CHUNK_ROWS

HERE = Path(__file__).parent
SIZES = {10_000: 3, 100_000: 3, 1_000_000: 1}  # tickets: alternated rounds
CHUNK = 50_000
LABELS = HERE.parent / "samples" / "labels.yaml"


def write_table(path: Path, rows: int) -> None:
    """A table of ``rows`` different tickets, written in pieces: sample texts with a number behind them."""
    pieces = make_tickets(5_000, seed=1)
    writer = None
    for start in range(0, rows, CHUNK):
        count = min(CHUNK, rows - start)
        numbers = pl.Series(np.arange(start, start + count).astype(str))
        frame = pieces[np.arange(start, start + count) % len(pieces)].with_columns(
            pl.Series("ticket_id", "T" + numbers), body=pl.col("body") + " " + numbers
        )
        table = frame.to_arrow()
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    writer.close()


def bare_tokenizer(tickets: Path, tokenizer: Tokenizer) -> int:
    """Ids of all texts by the tokenizer alone, the same pieces at a time; returns how many."""
    total = 0
    for batch in pq.ParquetFile(tickets).iter_batches(CHUNK_ROWS, columns=["text"]):
        texts = batch.column(0).to_pylist()
        total += sum(len(encoding.ids) for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    return total


def measure(rows: int, rounds: int) -> dict:
    """Seconds of reading, of both ways to tokenize in turn, and of planning; peak memory of this process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        folder.mkdir()
        write_table(Path(name) / "tickets.parquet", rows)
        settings = RunSettings(
            input=str(Path(name) / "tickets.parquet"), labels=str(LABELS), output="out", model=EMBEDDED_MODEL
        )
        prepare_engine(settings, folder)
        before = psutil.Process().memory_info().rss
        start = time.perf_counter()
        read_tickets(
            settings.input, folder, id_column=settings.id_column, text_columns=settings.text_columns, limit=None
        )
        reading = time.perf_counter() - start
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        tokenizer.encode_special_tokens = True
        alone, ours = [], []
        for _ in range(rounds):
            start = time.perf_counter()
            bare_tokenizer(folder / stages.TICKETS, tokenizer)
            middle = time.perf_counter()
            stages.tokenize(folder)
            alone.append(middle - start)
            ours.append(time.perf_counter() - middle)
        start = time.perf_counter()
        made = stages.plan(folder, batch_size=None, max_buckets=256)
        writing = time.perf_counter() - start
        lengths = np.sort(pl.read_parquet(folder / stages.TOKENS, columns=["token_length"]).to_series().to_numpy())
        start = time.perf_counter()
        plan_batches(lengths[::-1].astype(np.int64), PlanRule(padded=True, token_budget=2048))
        planning = time.perf_counter() - start
        peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    return {
        "tickets": rows,
        "read_seconds": reading,
        "tokenizer_alone_seconds": alone,
        "tokenize_seconds": ours,
        "ratio": statistics.median(b / a for a, b in zip(alone, ours, strict=True)),
        "plan_and_write_seconds": writing,
        "plan_seconds": planning,
        "buckets": len(made.buckets),
        "memory_before": before,
        "peak_memory": peak,
    }


def write_report(results: list[dict]) -> None:
    """The key ``tables`` of results.json and the part of results.md."""
    path = HERE / "results.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps(kept | {"tables": results}, indent=1) + "\n", encoding="utf-8")
    lines = [
        "## Large tables before the model runs",
        "",
        "`python -m benchmarks.bench_tables`: the tokenize task against the bare tokenizer on the same texts, in turn; "
        "the plan by dynamic programming alone, and with the bucket files written. Different sample tickets, a process "
        "a size; memory is that process's, its imports included.",
        "",
        "| tickets | read, s | tokenizer alone, s | tokenize task, s | times the tokenizer | plan alone, s "
        "| plan and bucket files, s | buckets | memory before, MB | peak, MB |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {run['tickets']:,} | {run['read_seconds']:.1f} | {statistics.median(run['tokenizer_alone_seconds']):.1f} "
        f"| {statistics.median(run['tokenize_seconds']):.1f} | {run['ratio']:.2f} | {run['plan_seconds']:.2f} "
        f"| {run['plan_and_write_seconds']:.1f} | {run['buckets']} | {run['memory_before'] / 2**20:.0f} "
        f"| {run['peak_memory'] / 2**20:.0f} |"
        for run in results
    ]
    replace_part(HERE / "results.md", "tables", "\n".join(lines))


def main(
    only: Annotated[int, typer.Option(help="Measure this size in this process and print it.")] = 0,
    most: Annotated[int, typer.Option(help="Leave larger sizes out.")] = 1_000_000,
) -> None:
    """Measure every size in a process of its own."""
    if only:
        print(json.dumps(measure(only, SIZES.get(only, 1))))
        return
    results = []
    for rows in (size for size in SIZES if size <= most):
        command = [sys.executable, "-m", "benchmarks.bench_tables", "--only", str(rows)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=HERE.parent)
        results.append(json.loads(done.stdout.splitlines()[-1]))
        print({key: value for key, value in results[-1].items() if key != "tokenize_seconds"}, flush=True)
    write_report(results)


if __name__ == "__main__":
    typer.run(main)
