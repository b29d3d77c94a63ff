"""The stages of a night one after the other, as plain calls: what a flow run does, without an orchestrator.

The functions are those behind the flow's tasks, called without Prefect's engine. Run as a process of its own by
`bench_nights`: ``python -m benchmarks.bare_night SETTINGS.json`` prints the seconds.
"""

import json
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

from prefect.logging import disable_run_logger

import flows  # noqa: F401  telemetry off
from tasks.bucket import bucket, find_scored
from tasks.classify import classify_bucket, load_model
from tasks.prepare import prepare
from tasks.read import read
from tasks.tokenize import tokenize
from tasks.validate import check_input, check_output, gather, spot_check
from tasks.write import write
from ticket_engine.publish import claimed_output
from ticket_engine.settings import RunSettings


def run_bare(settings: RunSettings) -> float:
    """Seconds from the claim of the output to its publication."""
    started = time.perf_counter()
    settings = settings.resolved(date.today())
    output, store = Path(settings.output), Path(settings.store)
    with claimed_output(output) as folder, disable_run_logger():
        rows = read.fn(settings, folder)
        workers = prepare.fn(settings, folder)
        tokens = tokenize.fn(folder)
        incoming = check_input.fn(settings, folder, rows)
        find_scored.fn(folder, store)
        plan = bucket.fn(settings, folder)
        load_model.fn(folder)
        classifying = time.perf_counter()
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(lambda one: classify_bucket.fn(one, folder, store), plan.buckets))
        (folder / "seconds" / "classify.json").write_text(json.dumps(time.perf_counter() - classifying))
        counts = gather.fn(settings, folder, store)
        checked = spot_check.fn(settings, folder)
        outgoing = check_output.fn(settings, folder, checked, incoming, rows.rows)
        write.fn(settings, folder, (rows, tokens, plan, counts, checked, incoming, outgoing))
    return time.perf_counter() - started


if __name__ == "__main__":
    given = RunSettings(**json.loads(Path(sys.argv[1]).read_text()))
    shutil.rmtree(given.store, ignore_errors=True)
    print(json.dumps(run_bare(given)))
