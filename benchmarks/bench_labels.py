"""How right labels are, by set, rows and way of labelling: `python -m benchmarks.bench_labels`.

Train and test rows are disjoint by text; five seeds. Hidden states are collected once a set and kept in the
cache folder, so a second run only fits. Writes ``labels.json`` and its part of ``results.md``.
"""

import hashlib
import json
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import polars as pl
import typer
from platformdirs import user_cache_path

from benchmarks.label_report import write_label_report
from ticket_engine.baselines import naive_bayes, tfidf_regression, train_and_answer
from ticket_engine.calibration import precision_threshold
from ticket_engine.engine import Engine
from ticket_engine.engine_spec import TOKENIZER_FILE
from ticket_engine.errors import HeadError
from ticket_engine.fitting_features import count_layers, hidden_of, label_texts
from ticket_engine.head_designs import FittingRows
from ticket_engine.head_fitting import FitRule, fit_head
from ticket_engine.heads import Block, Head, HeadIdentity, apply_head, stage_log_probs
from ticket_engine.labels import LabelSet, read_labels
from ticket_engine.lexical import lexical_features
from ticket_engine.models import load_weights
from ticket_engine.preparation import prepare_engine
from ticket_engine.settings import EMBEDDED_MODEL, RunSettings
from ticket_engine.tokenization import load_ticket_tokenizer

HERE = Path(__file__).parent
TICKETS = HERE.parent.parent / "shared" / "data" / "tickets"
ROWS = (0, 20, 50, 100, 200, 500)
MAX_TOKENS = 256
MOST_TEST = 400
UNLABELLED = 100
ZERO_SHOT_TICKETS = 200
IDENTITY = HeadIdentity("", "", "", "")


@dataclass(frozen=True, slots=True)
class TicketSet:
    """One set: tickets with true labels, label rows, and the model's own scores of a few tickets."""

    name: str
    labels: LabelSet
    tickets: FittingRows
    label_rows: FittingRows
    zero_shot: np.ndarray

    @property
    def names(self) -> np.ndarray:
        """Label names in order."""
        return np.array(self.labels.names)


def load_set(name: str, model: str, cache: Path) -> TicketSet:
    """A set with its hidden states, computed or from the cache."""
    labels = read_labels(TICKETS / f"{name}.labels.yaml")
    frame = pl.read_parquet(TICKETS / f"{name}.dev.parquet")
    texts = frame.select(pl.concat_str("subject", "body", separator="\n", ignore_nulls=True)).to_series().to_list()
    place = {label: index for index, label in enumerate(labels.names)}
    truth = np.array([place[label] for label in frame["label"]])
    key = hashlib.sha256(
        json.dumps([model, MAX_TOKENS, labels.content_hash, texts, label_texts(labels.labels)[0]]).encode()
    ).hexdigest()[:16]
    path = cache / f"{name}-{key}.npz"
    if not path.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        np.savez(path, **_collect(name, labels, model, texts, cache))
    with np.load(path) as stored:
        blocks = {
            Block(int(key.split("_")[1]), key.split("_")[0]): stored[key].astype(np.float32)
            for key in stored
            if "_" in key
        }
        zero_shot = stored["scores"]
    count = len(texts)
    tickets = FittingRows(texts, truth, {block: values[:count] for block, values in blocks.items()})
    rows = FittingRows(*label_texts(labels.labels), {block: values[count:] for block, values in blocks.items()})
    return TicketSet(name, labels, tickets, rows, zero_shot)


def _collect(name: str, labels: LabelSet, model: str, texts: list[str], cache: Path) -> dict[str, np.ndarray]:
    settings = RunSettings(
        input=name,
        labels=str(TICKETS / f"{name}.labels.yaml"),
        output=str(cache / "out"),
        model=model,
        execution="packed",
        max_ticket_tokens=MAX_TOKENS,
    )
    spec = prepare_engine(settings, cache)
    engine = Engine(spec, load_weights(Path(spec.model_folder), spec.dtype))
    tokenizer = load_ticket_tokenizer(
        cache / TOKENIZER_FILE, spec.prompt, max_ticket_tokens=MAX_TOKENS, truncate=spec.truncate
    )
    encoded = tokenizer.encode([*texts, *label_texts(labels.labels)[0]])
    ids = np.split(encoded.flat, np.cumsum(encoded.lengths)[:-1])
    rule = FitRule(layers=count_layers(Path(spec.model_folder)))
    wanted = rule.blocks(rule.layers)
    made = {
        block.key: values.astype(np.float16)
        for block, values in hidden_of(engine, ids, rule.depths).items()
        if block in wanted
    }
    order = sorted(range(min(ZERO_SHOT_TICKETS, len(texts))), key=lambda row: -len(ids[row]))
    scores = np.empty((len(order), len(labels.labels)), dtype=np.float32)
    for start in range(0, len(order), 16):
        rows = order[start : start + 16]
        scores[rows] = engine.score([ids[row] for row in rows])
    return {**made, "scores": scores}


def split(ticket_set: TicketSet, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Test rows and rows to draw labelled ones from, no text in both, the latter in random order."""
    groups: dict[str, int] = {}
    group_of = np.array(
        [groups.setdefault(" ".join(t.casefold().split()), len(groups)) for t in ticket_set.tickets.texts]
    )
    rng = np.random.default_rng(1000 + seed)
    drawn = rng.permutation(len(groups))[: min(MOST_TEST, int(0.3 * len(groups)))]
    is_test = np.isin(group_of, drawn)
    return np.flatnonzero(is_test), rng.permutation(np.flatnonzero(~is_test))


def measure(ticket_set: TicketSet, rows: int, seed: int, layers: int) -> dict:
    """All ways of labelling on one split: right answers as 0 and 1 a test ticket, and what the head adds."""
    test_rows, pool = split(ticket_set, seed)
    test = ticket_set.tickets.take(test_rows)
    train_rows = pool[:rows]
    record: dict = {
        "set": ticket_set.name,
        "rows": len(train_rows),
        "asked": rows,
        "seed": seed,
        "test": len(test_rows),
    }
    record["right"] = right = {}
    if rows:
        _measure_rivals(ticket_set, train_rows, test, right)
    started = time.process_time()
    unlabelled = pool[rows : rows + UNLABELLED] if rows < 20 else pool[:0]
    train = ticket_set.tickets.take(np.concatenate([train_rows, unlabelled]))
    train.label_indices[len(train_rows) :] = -1
    head = _fit(ticket_set, train, FitRule(layers=layers, seed=seed), record)
    record["fit_seconds"] = round(time.process_time() - started, 2)
    full = _fit(ticket_set, train, FitRule(layers=layers, depth=layers, seed=seed), record)
    lexical = lexical_features(test.texts, head.lexicon)
    _measure_head(head, lexical, test, layers, record, "head")
    _measure_head(full, lexical, test, layers, record, "full depth in stages")
    last = stage_log_probs(full, len(full.stages) - 1, lexical, test.hidden)
    right["always full depth"] = _bits(last.argmax(1) == test.label_indices)
    text = stage_log_probs(full, 0, lexical, {})
    right["text alone"] = _bits(text.argmax(1) == test.label_indices)
    return record


def _measure_rivals(ticket_set: TicketSet, train_rows: np.ndarray, test: FittingRows, right: dict) -> None:
    names, truth = ticket_set.names, ticket_set.names[test.label_indices]
    train = ticket_set.tickets.take(train_rows)
    given = names[train.label_indices]
    right["largest class"] = _bits(truth == names[np.bincount(train.label_indices).argmax()])
    rivals = {"naive Bayes": naive_bayes(), "TF-IDF C=10": tfidf_regression(10), "TF-IDF C=100": tfidf_regression(100)}
    for name, model in rivals.items():
        right[name] = _bits(train_and_answer(model, train.texts, given, test.texts) == truth)


def _fit(ticket_set: TicketSet, train: FittingRows, rule: FitRule, record: dict) -> Head:
    try:
        head = fit_head(train, ticket_set.label_rows, ticket_set.labels.names, rule=rule, identity=IDENTITY)
        record["refused"] = False
    except HeadError:
        record["refused"] = True
        rule = FitRule(layers=rule.layers, depth=rule.depth, seed=rule.seed, unproven=True)
        head = fit_head(train, ticket_set.label_rows, ticket_set.labels.names, rule=rule, identity=IDENTITY)
    return head


def _measure_head(head: Head, lexical, test: FittingRows, layers: int, record: dict, name: str) -> None:
    log_probs, stage_of = apply_head(head, lexical, test.hidden)
    confidence, correct = np.exp(log_probs.max(1)), log_probs.argmax(1) == test.label_indices
    record["right"][name] = _bits(correct)
    reached, cost = 0, 0.0
    for index, stage in enumerate(head.stages):
        cost += float((stage_of >= index).mean()) * (stage.depth - reached) / layers
        reached = stage.depth
    made = {
        "depths": [stage.depth for stage in head.stages],
        "deciding": [round(float((stage_of == index).mean()), 4) for index in range(len(head.stages))],
        "share_of_full_depth": round(cost, 4),
        "confidence": [round(float(value), 4) for value in confidence],
    }
    threshold = precision_threshold(head.held_out_confidence, head.held_out_correct, 0.9)
    if threshold is not None:
        kept = confidence >= threshold
        made["promised_90"] = [int(kept.sum()), int(correct[kept].sum())]
    record[name] = made


def _bits(values: np.ndarray) -> str:
    """A 0 or 1 a test ticket."""
    return "".join("1" if value else "0" for value in values)


def measure_set(ticket_set: TicketSet, layers: int, seeds: int, all_seeds: int) -> dict:
    """All records of a set, and its zero-shot accuracies."""
    records: list[dict] = []
    most = len(split(ticket_set, 0)[1])
    for rows in [*(rows for rows in ROWS if rows < most), most]:
        for seed in range(seeds if rows <= max(ROWS) else min(seeds, all_seeds)):
            records.append(measure(ticket_set, rows, seed, layers) | {"all": rows == most})
        print(_progress(records, ticket_set.name, rows), flush=True)
    return {"records": records, "zero_shot": measure_zero_shot(ticket_set)}


def measure_zero_shot(ticket_set: TicketSet) -> dict[str, float]:
    """Accuracy of the model's own label scores, as they are and after the run's mean is subtracted."""
    truth = ticket_set.tickets.label_indices[: len(ticket_set.zero_shot)]
    centred = ticket_set.zero_shot - ticket_set.zero_shot.mean(0)
    return {
        "tickets": len(truth),
        "raw": float((ticket_set.zero_shot.argmax(1) == truth).mean()),
        "calibrated": float((centred.argmax(1) == truth).mean()),
    }


def main(
    sets: Annotated[str, typer.Option(help="Names, comma separated; empty: all.")] = "",
    seeds: Annotated[int, typer.Option(help="Splits a set.")] = 5,
    all_seeds: Annotated[int, typer.Option(help="Splits of the row with all labels.")] = 3,
    model: Annotated[str, typer.Option(help="As in classify-tickets.")] = EMBEDDED_MODEL,
    resume: Annotated[bool, typer.Option("--resume", help="Keep sets that an earlier run measured.")] = False,
) -> None:
    """Measure every set and write labels.json and results.md."""
    from ticket_engine.models import find_model

    cache = user_cache_path("ticket-engine") / "bench-labels"
    names = [name for name in sets.split(",") if name] or sorted(
        p.name.split(".")[0] for p in TICKETS.glob("*.dev.parquet")
    )
    layers = count_layers(find_model(model))
    records, zero_shot = [], {}
    for name in names:
        done = cache / f"{name}.records.json"
        if not (resume and done.is_file()):
            made = measure_set(load_set(name, model, cache), layers, seeds, all_seeds)
            done.write_text(json.dumps(made), encoding="utf-8")
        kept = json.loads(done.read_text(encoding="utf-8"))
        records += kept["records"]
        zero_shot[name] = kept["zero_shot"]
    results = {"model": model, "layers": layers, "seeds": seeds, "zero_shot": zero_shot, "records": records}
    write_label_report(results, HERE)


def _progress(records: list[dict], name: str, rows: int) -> str:
    sums = defaultdict(list)
    for record in records:
        if record["set"] == name and record["asked"] == rows:
            for way, bits in record["right"].items():
                sums[way].append(bits.count("1") / len(bits))
    return f"{name} {rows}: " + ", ".join(f"{way} {np.mean(values):.3f}" for way, values in sums.items())


if __name__ == "__main__":
    typer.run(main)
