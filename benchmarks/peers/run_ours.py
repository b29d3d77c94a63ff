"""The engine's own passes, packed, prefix once, in a process of its own."""

from dataclasses import replace

import numpy as np
from protocol import Answer, nothing, serve

from benchmarks.bench_engine import Work, load_bench, ours
from ticket_engine.label_trie import build_trie
from ticket_engine.memory import keep_freed_memory


def load(job: dict) -> tuple[Answer, object]:
    """The packed view with the job's labels."""
    keep_freed_memory()
    bench = load_bench(job["model"], job["dtype"], job["threads"])
    bench = replace(bench, trie=build_trie(tuple((token,) for token in job["labels"])))

    def answer(work: dict) -> list[int]:
        tickets = [np.array(ids, dtype=np.int64) for ids in work["tickets"]]
        made = Work(tickets, tuple(work["prefix"]))
        return ours(bench, made, packed=True, share_prefix=bool(work["prefix"])).tolist()

    return answer, nothing


if __name__ == "__main__":
    serve(load)
