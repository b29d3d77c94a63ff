"""Our engine against vLLM for CPU, llama.cpp, CTranslate2 and cappr: `python -m benchmarks.bench_peers`.

Each program has its own virtual environment and process, with the same weights, token ids, labels and
processors. In every round ours runs before each peer; whoever is not asked is stopped by a signal. Adds keys to
``results.json``, its runs to ``runs`` there, and a part to ``results.md``.
"""

import hashlib
import json
import statistics
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from benchmarks.bench_engine import EMBEDDED, PREFIX_TOKENS, published_lengths
from benchmarks.peers.environments import PEERS, ROOT, Peer, model_files, set_up
from benchmarks.peers.workers import Worker, WorkerError
from benchmarks.report import replace_part
from ticket_engine.label_trie import build_trie
from ticket_engine.models import find_model, load_tokenizer, load_weights
from ticket_engine.probe import processors
from ticket_engine.reference import reference_scores

HERE = Path(__file__).parent
FOLDER = ROOT / ".cache" / "peers"
LABELS = (" billing", " technical", " account", " delivery", " payment")
OURS = Peer("run_ours.py", (), "bfloat16")
EAGER = "vllm without compiling"
PART = "peers"


def make_works(tickets: int) -> dict[str, dict]:
    """The published 600 tickets, or fewer evenly over the lengths, with and without a shared prefix."""
    everything = published_lengths()
    some = [ids.tolist() for ids in everything[:: max(1, len(everything) // tickets)][:tickets]]
    prefix = np.random.default_rng(0).integers(100, 40000, PREFIX_TOKENS).tolist()
    return {"no prefix": {"prefix": [], "tickets": some}, "prefix of 120": {"prefix": prefix, "tickets": some}}


def start(stack: ExitStack, name: str, job: dict) -> Worker:
    """A worker that is ready and stands still."""
    peer = OURS if name.startswith("ours") else PEERS[name.split()[0]]
    options = peer.options | ({"enforce_eager": True} if name == EAGER else {})
    worker = Worker(
        "ours" if peer is OURS else name.split()[0],
        peer.script,
        job | {"dtype": peer.dtype, "options": options},
        folder=FOLDER,
        environment=peer.environment,
    )
    return stack.enter_context(worker)


def measure(names: list[str], job: dict, rounds: int, failures: dict[str, str]) -> list[dict]:
    """Every single run: after one warm-up each, ours and then one peer, peer after peer, round after round."""
    runs: list[dict] = []
    with ExitStack() as stack:
        ours = start(stack, "ours", job)
        peers = {}
        for name in names:
            try:
                peers[name] = start(stack, name, job)
            except WorkerError as error:
                failures[name] = str(error)
        for work in job["works"]:
            for number in range(-1, rounds):
                for name, peer in list(peers.items()):
                    try:
                        pair = (ours.ask(work), peer.ask(work))
                    except WorkerError as error:
                        failures[name] = str(error)
                        del peers[name]
                        continue
                    if number < 0:
                        continue
                    for row, dtype, answer in zip(
                        (f"ours beside {name}", name), (OURS.dtype, PEERS[name].dtype), pair, strict=True
                    ):
                        context = {"round": number, "order": len(runs), "dtype": dtype, "threads": job["threads"]}
                        runs.append(_run(job, work, row) | context | answer)
                    print(
                        f"{work} round {number} {name}: {pair[0]['seconds']:.2f} {pair[1]['seconds']:.2f}", flush=True
                    )
    return runs


def measure_starts(names: list[str], job: dict, repetitions: int, failures: dict[str, str]) -> list[dict]:
    """Seconds from starting a process to the last label, ours and then each of ``names``, one process at a time."""
    runs: list[dict] = []
    work = "prefix of 120"
    for number in range(repetitions):
        for name in ("ours", *names):
            try:
                with ExitStack() as stack:
                    worker = start(stack, name, job)
                    answer = worker.ask(work)
                    seconds = worker.since_start()
            except WorkerError as error:
                failures[f"{name} from start"] = str(error)
                continue
            dtype = OURS.dtype if name == "ours" else PEERS[name.split()[0]].dtype
            context = {"round": number, "order": len(runs), "dtype": dtype, "threads": job["threads"]}
            after = {"seconds": seconds, "seconds_of_pass": answer["seconds"], "labels": answer["labels"]}
            runs.append(_run(job, "from start", name) | context | after)
            print(
                f"from start {number} {name}: {seconds:.1f} s, the labels alone {answer['seconds']:.1f} s", flush=True
            )
    return runs


def _run(job: dict, work: str, row: str) -> dict:
    return {
        "part": PART,
        "model": EMBEDDED,
        "work": work,
        "tickets": len(next(iter(job["works"].values()))["tickets"]),
        "row": row,
        "workers": 1,
    }


def references(job: dict) -> dict[str, np.ndarray]:
    """float32 log-probabilities of the reference a work, ``(tickets, labels)``; kept, since they never change."""
    path = FOLDER / f"reference-{hashlib.sha256(json.dumps([job['works'], job['labels']]).encode()).hexdigest()}.npz"
    if not path.is_file():
        model = load_weights(Path(job["model"]), "float32")
        trie = build_trie(tuple((token,) for token in job["labels"]))
        scores = {}
        with torch.inference_mode():
            for name, work in job["works"].items():
                rows = [reference_scores(model, [*work["prefix"], *ids], trie) for ids in work["tickets"]]
                scores[name] = torch.stack(rows).numpy()
        FOLDER.mkdir(parents=True, exist_ok=True)
        np.savez(path, **scores)
    with np.load(path) as kept:
        return dict(kept)


def agreement(labels: list[int], scores: np.ndarray) -> tuple[float, float]:
    """Share of equal labels, and the largest lead of the reference's label where they differ, in log-probability."""
    given = np.array(labels)
    lost = scores.max(1) - scores[np.arange(len(given)), given]
    return float((given == scores.argmax(1)).mean()), float(lost.max())


def pair_ratios(runs: list[dict], peer: str, ours: str, work: str) -> list[float]:
    """Seconds of a peer divided by those of ours, by round; above 1 ours is faster."""
    seconds = {(run["row"], run["round"]): run["seconds"] for run in runs if run["work"] == work}
    return [seconds[peer, number] / seconds[ours, number] for row, number in seconds
            if row == peer and (ours, number) in seconds]  # fmt: skip


def summarise(runs: list[dict], scores: dict[str, np.ndarray], failures: dict[str, str]) -> dict:
    """The keys of ``results.json``. Of the two works the one that is worse for us counts."""
    rows = []
    for work, row in dict.fromkeys((run["work"], run["row"]) for run in runs if not run["row"].startswith("ours")):
        values = pair_ratios(runs, row, "ours" if work == "from start" else f"ours beside {row}", work)
        if not values:
            continue
        mine = [run for run in runs if (run["work"], run["row"]) == (work, row)]
        beside = [run for run in runs if run["work"] == work and run["row"] in ("ours", f"ours beside {row}")]
        facts = {"work": work, "peer": row, "dtype": mine[0]["dtype"], "tickets": mine[0]["tickets"]}
        facts |= {"median": statistics.median(values), "min": min(values), "max": max(values), "rounds": len(values)}
        for key, some in (("agreement", mine), ("ours_agreement", beside)):
            if "labels" in some[0] and work in scores:
                facts[key], facts[f"{key}_lost"] = agreement(some[-1]["labels"], scores[work])
        facts["seconds"] = statistics.median(run["seconds"] for run in mine)
        facts["ours_seconds"] = statistics.median(run["seconds"] for run in beside)
        rows.append(facts)
    keys: dict = {"peers": rows, "peers_failed": failures}
    steady = [row for row in rows if row["work"] != "from start"]
    others = [row["median"] for row in steady if row["peer"] != "vllm"]
    vllm = [row["median"] for row in steady if row["peer"] == "vllm"]
    starts = [row["median"] for row in rows if row["work"] == "from start"]
    for key, values in (("best_peer_ratio", others), ("vllm_ratio_steady", vllm), ("vllm_ratio_from_start", starts)):
        if values:
            keys[key] = min(values)
    return keys


def write(runs: list[dict], scores: dict[str, np.ndarray], failures: dict[str, str]) -> None:
    """Put works just measured in place of older ones in ``results.json``, and write the part of ``results.md``."""
    path = HERE / "results.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    fresh = {run["work"] for run in runs}
    older = kept.get("runs", [])
    mine = [run for run in older if run.get("part") == PART and run["work"] not in fresh] + runs
    summary = summarise(mine, scores, failures)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    summary["peers_commit"] = commit.stdout.strip()
    others = [run for run in older if run.get("part") != PART]
    path.write_text(json.dumps({**kept, **summary, "runs": others + mine}, indent=1) + "\n", encoding="utf-8")
    replace_part(HERE / "results.md", PART, page(summary))


def page(summary: dict) -> str:
    """The part of ``results.md``."""
    lines = [
        "## Beside other programs",
        "",
        f"`python -m benchmarks.bench_peers`, commit {summary['peers_commit']}, {processors()} processors for everyone, "
        f"{EMBEDDED} with the same weights, token ids and {len(LABELS)} one-token labels. Times are those of the peer "
        "divided by ours, medians of neighbouring runs, least to largest in brackets; above 1 ours is faster. Ours runs "
        f"in {OURS.dtype}, packed, prefix once; each peer in the number format that was fastest here and with its own "
        "reuse of the prefix. Label agreement is with the float32 reference; lead is the largest that the reference's label "
        "had where they differ, natural log. From start: process start to the last label.",
        "",
        "| work | peer | number format | tickets | peer's time / ours | seconds, peer and ours | agreement, peer and ours | lead, peer and ours |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in summary["peers"]:
        agree = lead = ""
        if "agreement" in row:
            agree = f"{row['agreement']:.3f}, {row['ours_agreement']:.3f}"
            lead = f"{row['agreement_lost']:.3f}, {row['ours_agreement_lost']:.3f}"
        lines.append(
            f"| {row['work']} | {_named(row['peer'])} | {row['dtype']} | {row['tickets']} | {row['median']:.2f} "
            f"[{row['min']:.2f} to {row['max']:.2f}] | {row['seconds']:.1f}, {row['ours_seconds']:.1f} | {agree} | {lead} |"
        )
    for name, error in summary["peers_failed"].items():
        lines += ["", f"{_named(name)} did not run:", "", "```", error, "```"]
    return "\n".join(lines)


def _named(row: str) -> str:
    name, _, rest = row.partition(" ")
    return f"{PEERS[name].packages[-1 if name == 'cappr' else 0]} {rest}".strip()


def main(
    peers: Annotated[str, typer.Option(help="Names, comma separated; empty: all.")] = "",
    tickets: Annotated[int, typer.Option(help="Of the 600, evenly over the lengths, in the steady rounds.")] = 48,
    rounds: Annotated[int, typer.Option(help="Counted rounds of each work; 0: none.")] = 5,
    starts: Annotated[int, typer.Option(help="Repetitions from process start, ours and vLLM; 0: none.")] = 3,
    start_tickets: Annotated[int, typer.Option(help="Tickets of a run from process start.")] = 600,
    only_set_up: Annotated[bool, typer.Option("--only-set-up", help="Install and convert, measure nothing.")] = False,
    write_results: Annotated[bool, typer.Option("--write/--no-write", help="Keep what was measured.")] = True,
) -> None:
    """Set up what is missing, measure, and write results.json and results.md beside this file."""
    names = [name for name in peers.split(",") if name] or list(PEERS)
    failures = {name: error for name in names if (error := set_up(name))}
    model = find_model(EMBEDDED)
    tokenizer = load_tokenizer(model)
    job = {
        "model": str(model),
        "threads": processors(),
        "labels": [tokenizer(label, add_special_tokens=False).input_ids[0] for label in LABELS],
        "works": make_works(tickets),
    }
    job |= model_files(model)
    scores = references(job)
    if only_set_up:
        print(json.dumps(failures) if failures else "All peers are set up.")
        return
    usable = [name for name in names if name not in failures]
    runs = measure(usable, job, rounds, failures) if rounds else []
    if starts and "vllm" in usable:
        runs += measure_starts(["vllm", EAGER], job | {"works": make_works(start_tickets)}, starts, failures)
    if write_results:
        write(runs, scores, failures)
    print(
        json.dumps({key: value for key, value in summarise(runs, scores, failures).items() if key != "runs"}, indent=1)
    )


if __name__ == "__main__":
    typer.run(main)
