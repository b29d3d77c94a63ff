"""Speed of the engine against the ways that anybody would write it. `make bench` runs this.

Every comparison alternates A B A B in one process after a warm-up and reports the median of the ratios of
neighbouring runs, with the least and the largest; the matrix-product peak of the same number format and
threads is measured between rounds. Absolute times of a shared machine mean nothing.
"""

import json
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from benchmarks.pictures import draw_batches, draw_speed
from benchmarks.report import write_report
from samples.sample_tickets import make_tickets
from ticket_engine.bucketing import PlanRule, padding_overhead, plan_batches
from ticket_engine.engine import packed_view
from ticket_engine.label_trie import LabelTrie, build_trie
from ticket_engine.memory import keep_freed_memory
from ticket_engine.models import find_model, load_tokenizer, load_weights
from ticket_engine.probe import choose_speed, processors, throughput
from ticket_engine.scoring import Batch, PrefixCache, compute_prefix, label_scores, packed_hidden, padded_hidden

HERE = Path(__file__).parent
QWEN_SHAPE = "qwen2.5-0.5b-shape"
PREFIX_TOKENS = 120
BATCH = 32
BUDGET = 2048
FEW_ROUNDS = {"sorted batches of 32": 2}  # slower than one by one here, and not what the targets compare with
EMBEDDED = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class Work:
    """Token ids of tickets, longest first, with a shared prefix that may be empty."""

    tickets: list[np.ndarray]
    prefix: tuple[int, ...]

    @property
    def own_tokens(self) -> int:
        """Tokens of the tickets themselves."""
        return sum(len(ids) for ids in self.tickets)


@dataclass(frozen=True, slots=True)
class Bench:
    """A model, its packed view and three one-token labels.

    ``threads`` are those of the rows that anybody would write; ``split`` is the engine's own use of the same
    processors, ``(threads of a pass, passes at once)``.
    """

    model: PreTrainedModel
    view: PreTrainedModel
    trie: LabelTrie
    dtype: str
    threads: int
    split: tuple[int, int]

    def ways(self, row: str) -> tuple[int, int]:
        """Threads of a pass and passes at once: all processors in one pass, or what the engine's probe chose."""
        return self.split if row.startswith("ours") else (self.threads, 1)


def one_by_one(bench: Bench, work: Work) -> np.ndarray:
    """Whole prompt, one ticket a pass, last logits only: transformers as it comes."""
    labels = [path[0][1] for path in bench.trie.edges]
    rows = []
    for ids in work.tickets:
        prompt = torch.tensor([[*work.prefix, *ids.tolist()]])
        rows.append(bench.model(prompt, logits_to_keep=1, use_cache=False).logits[0, -1, labels].float())
    return torch.stack(rows).argmax(1).numpy()


def sorted_batches(bench: Bench, work: Work) -> np.ndarray:
    """Batches of 32 sorted prompts, left-padded with a mask, last logits only: as anybody would write it."""
    labels = [path[0][1] for path in bench.trie.edges]
    rows = []
    for start in range(0, len(work.tickets), BATCH):
        prompts = [[*work.prefix, *ids.tolist()] for ids in work.tickets[start : start + BATCH]]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = bench.model(ids, attention_mask=mask, position_ids=positions, logits_to_keep=1, use_cache=False).logits
        rows.append(logits[:, -1, labels].float())
    return torch.cat(rows).argmax(1).numpy()


def ours(bench: Bench, work: Work, *, packed: bool, share_prefix: bool) -> np.ndarray:
    """The engine's passes: planned, packed or padded, prefix computed once or with every ticket."""
    front = np.array(() if share_prefix else work.prefix, dtype=np.int64)
    prefix = compute_prefix(bench.model, work.prefix) if share_prefix else PrefixCache((), (), 0)
    lengths = np.array([len(ids) for ids in work.tickets])
    rule = PlanRule(padded=not packed, token_budget=BUDGET, extra_tokens=len(front))
    starts = plan_batches(lengths, rule)
    threads, workers = bench.ways("ours")

    def score(edges: tuple[int, int]) -> np.ndarray:
        torch.set_num_threads(threads)
        suffixes = [np.concatenate([front, ids]) for ids in work.tickets[slice(*edges)]]
        batch = Batch(np.concatenate(suffixes), np.array([len(ids) for ids in suffixes]))
        with torch.inference_mode():
            hidden = (
                packed_hidden(bench.view, batch, prefix, bench.trie)
                if packed
                else padded_hidden(bench.model, batch, prefix, bench.trie)
            )
            return label_scores(bench.model, *hidden, bench.trie).argmax(1).numpy()

    with ThreadPoolExecutor(workers) as pool:
        return np.concatenate(list(pool.map(score, zip(starts, np.append(starts[1:], len(lengths)), strict=True))))


ROWS: dict[str, Callable[[Bench, Work], np.ndarray]] = {
    "one by one": one_by_one,
    "sorted batches of 32": sorted_batches,
    "ours padded": lambda bench, work: ours(bench, work, packed=False, share_prefix=False),
    "ours packed": lambda bench, work: ours(bench, work, packed=True, share_prefix=False),
    "ours packed + prefix": lambda bench, work: ours(bench, work, packed=True, share_prefix=True),
}


def measure(bench: Bench, work: Work, rows: list[str], rounds: int, runs: list[dict], context: dict) -> None:
    """Run the rows in turn, so many rounds after one warm-up round, and note every single measurement."""
    config = bench.model.config
    flops = 2 * sum(p.numel() for name, p in bench.model.named_parameters() if "layers" in name and p.dim() == 2)
    for number in range(-1, rounds):
        for name in rows:
            if name in FEW_ROUNDS and not 0 <= number < FEW_ROUNDS[name]:
                continue
            threads, workers = bench.ways(name)
            peak = 1e12 * throughput(bench.dtype, threads, workers, config.hidden_size, config.intermediate_size)
            torch.set_num_threads(threads)
            with torch.inference_mode():
                start = time.perf_counter()
                labels = ROWS[name](bench, work)
                seconds = time.perf_counter() - start
            if number < 0:
                continue
            computed = work.own_tokens + (0 if "prefix" in name else len(work.prefix) * len(work.tickets))
            runs.append(
                context
                | {
                    "row": name,
                    "round": number,
                    "order": len(runs),
                    "dtype": bench.dtype,
                    "threads": threads,
                    "workers": workers,
                    "seconds": seconds,
                    "peak_flops": peak,
                    "share_of_peak": flops * computed / seconds / peak,
                    "labels": [int(label) for label in np.bincount(labels, minlength=3)],
                }
            )
            print(
                f"{context['model']} {context['work']} {bench.dtype} round {number} {name}: {seconds:.2f} s", flush=True
            )


def ratio(runs: list[dict], over: str, under: str, **where: object) -> dict | None:
    """Median, least and largest of the time of ``over`` divided by that of ``under`` in the same round."""
    picked = [run for run in runs if all(run[key] == value for key, value in where.items())]
    seconds = {(run["row"], run["round"]): run["seconds"] for run in picked}
    values = [
        seconds[over, number] / seconds[under, number]
        for name, number in sorted(seconds)
        if name == under and (over, number) in seconds
    ]
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "rounds": len(values)}


def load_bench(model: str, dtype: str, threads: int) -> Bench:
    """The embedded model, a named one, or Qwen2.5-0.5B's shape with random weights."""
    if model == QWEN_SHAPE:
        torch.manual_seed(0)
        config = Qwen2Config(
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            vocab_size=151936,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )
        loaded = Qwen2ForCausalLM(config).to(getattr(torch, dtype)).eval().requires_grad_(False)
    else:
        loaded = load_weights(find_model(model), dtype)
    config = loaded.config
    choice = choose_speed(config.hidden_size, config.intermediate_size, dtype=dtype, threads=None, workers=None)
    split = (choice.threads, choice.workers)
    torch.set_num_threads(choice.threads)
    return Bench(loaded, packed_view(loaded), build_trie(((5,), (6,), (7,))), dtype, threads, split)


def published_lengths() -> list[np.ndarray]:
    """Token ids of the 600 sample tickets (48 to 449 tokens), longest first."""
    frame = make_tickets(600, seed=0)
    tokenizer = load_tokenizer(find_model(EMBEDDED))
    texts = ["\n".join(filter(None, row)) for row in frame.select("subject", "body").iter_rows()]
    ids = [np.array(row, dtype=np.int64) for row in tokenizer(texts, add_special_tokens=False).input_ids]
    return sorted(ids, key=len, reverse=True)


def paddings(tickets: list[np.ndarray]) -> dict[str, float]:
    """Padding overhead of the published scheme and of ours, over all tickets."""
    lengths = np.array([len(ids) for ids in tickets])
    fixed = plan_batches(lengths, PlanRule(padded=True, token_budget=2**62, batch_size=BATCH))
    planned = plan_batches(lengths, PlanRule(padded=True, token_budget=BUDGET))
    return {
        "published scheme": padding_overhead(lengths, fixed),
        "ours padded": padding_overhead(lengths, planned),
        "ours packed": 0.0,
        "all to the longest": padding_overhead(lengths, np.zeros(1, dtype=np.int64)),
    }


def main(
    model: Annotated[str, typer.Option(help="A further model: Hugging Face id or folder.")] = "",
    tickets: Annotated[int, typer.Option(help="Of the 600, evenly over the lengths.")] = 64,
    rounds: Annotated[int, typer.Option(help="Counted rounds.")] = 5,
    threads: Annotated[int, typer.Option(help="Threads of a pass in the rows that are not ours; 0: all.")] = 0,
) -> None:
    """Measure, then write results.json, results.md and the pictures beside this file."""
    keep_freed_memory()
    threads = threads or processors()
    everything = published_lengths()
    some = everything[:: max(1, len(everything) // tickets)][:tickets]
    generator = np.random.default_rng(0)
    prefix = tuple(int(token) for token in generator.integers(100, 40000, PREFIX_TOKENS))
    runs: list[dict] = []
    for name in [EMBEDDED, QWEN_SHAPE, *([model] if model else [])]:
        for dtype in ("bfloat16", "float32") if name == EMBEDDED else ("bfloat16",):
            small = some if name == EMBEDDED and dtype == "bfloat16" else some[::2]
            bench = load_bench(name, dtype, threads)
            for kind, work in (("no prefix", Work(small, ())), ("prefix of 120", Work(small, prefix))):
                rows = [row for row in ROWS if work.prefix or "prefix" not in row]
                context = {"model": name, "work": kind, "tickets": len(small)}
                measure(bench, work, rows, rounds, runs, context)
    results = summarise(runs, everything)
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    draw_batches(everything, HERE / "batches.png", batch=BATCH, budget=BUDGET)
    draw_speed(runs, HERE / "speed.png")
    write_report(results, HERE / "results.md")


def summarise(runs: list[dict], tickets: list[np.ndarray]) -> dict:
    """The keys of `results.json`: medians on the embedded model in bfloat16, and every single run."""
    old = HERE / "results.json"
    kept = json.loads(old.read_text()) if old.is_file() else {}
    main_runs = {"model": EMBEDDED, "dtype": "bfloat16"}
    packed = ratio(runs, "one by one", "ours packed", work="no prefix", **main_runs)
    shared = ratio(runs, "one by one", "ours packed + prefix", work="prefix of 120", **main_runs)
    shares = [run["share_of_peak"] for run in runs if run["row"] == "ours packed" and run["work"] == "no prefix"
              and all(run[key] == value for key, value in main_runs.items())]  # fmt: skip
    padding = paddings(tickets)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return kept | {
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "processors": processors(),
        "packed_over_sequential": packed["median"],
        "packed_prefix_over_sequential": shared["median"],
        "peak_share": statistics.median(shares),
        "padding_overhead_padded": padding["ours padded"],
        "padding": padding,
        "runs": runs,
    }


if __name__ == "__main__":
    typer.run(main)
