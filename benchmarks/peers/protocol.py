"""How a worker process is asked: JSON lines, ``ready`` once, then an answer a request. Standard library only.

It runs in the virtual environment of any peer, so it knows nothing of this project's packages.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

Answer = Callable[[dict], list[int]]


def serve(load: Callable[[dict], tuple[Answer, Callable[[], None]]]) -> None:
    """Load what the job file names, then answer requests until standard input ends.

    Args:
        load: From the job to two functions: one labels a work (``prefix`` and ``tickets`` as token ids) by
            the index of its best label, one forgets what is kept between runs and is not timed.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    answer, forget = load(job)
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        work = job["works"][json.loads(line)["work"]]
        forget()
        start = time.perf_counter()
        labels = answer(work)
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "labels": labels}), file=replies, flush=True)


def nothing() -> None:
    """For workers that keep nothing between runs."""


def prompts(work: dict) -> list[list[int]]:
    """Whole prompts of a work: prefix and ticket."""
    return [[*work["prefix"], *ids] for ids in work["tickets"]]
