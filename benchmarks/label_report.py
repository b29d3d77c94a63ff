"""Measured labels as a table, a picture and a few numbers that other tools read."""

import json
import platform
import subprocess
from collections import defaultdict
from pathlib import Path

import numpy as np

from ticket_engine.calibration import expected_calibration_error

BEGIN, END = "<!-- labels: begin -->", "<!-- labels: end -->"
RANDOM = "kaggle_random_labels"
WAYS = (
    "largest class",
    "naive Bayes",
    "TF-IDF C=10",
    "TF-IDF C=100",
    "text alone",
    "head",
    "full depth in stages",
    "always full depth",
)


def write_label_report(results: dict, folder: Path) -> None:
    """Write ``labels.json`` (records and summary), keys of ``results.json`` and the label part of ``results.md``.

    The rest of both files stays.
    """
    summary = summarise(results)
    stamp = {"commit": _commit(), "machine": platform.machine(), "model": results["model"], "seeds": results["seeds"]}
    content = json.dumps({**stamp, **summary, "records": _without_bits(results["records"])}, indent=1)
    (folder / "labels.json").write_text(content + "\n", encoding="utf-8")
    numbers = folder / "results.json"
    kept = json.loads(numbers.read_text(encoding="utf-8")) if numbers.is_file() else {}
    kept |= {"accuracy": summary["accuracy"], "accuracy_means": summary["means"]}
    numbers.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    page = folder / "results.md"
    old = page.read_text(encoding="utf-8") if page.is_file() else "# Benchmarks\n"
    before, _, rest = old.partition(BEGIN)
    after = rest.partition(END)[2]
    text = f"{before.rstrip()}\n\n{BEGIN}\n{markdown(stamp, summary)}\n{END}\n{after.lstrip()}"
    page.write_text(text, encoding="utf-8")


def summarise(results: dict) -> dict:
    """Means over seeds by set and rows, and over sets by rows."""
    grouped = defaultdict(list)
    for record in results["records"]:
        grouped[record["set"], "all" if record["all"] else str(record["asked"])].append(record)
    by_set: dict[str, dict] = defaultdict(dict)
    for (name, rows), records in grouped.items():
        by_set[name][rows] = _summary(records)
    at_500 = {name: made.get("500") or made["all"] for name, made in by_set.items()}
    learnable = [name for name in by_set if name != RANDOM]
    means = {}
    for rows in dict.fromkeys(rows for made in by_set.values() for rows in made):
        picked = [at_500[name] if rows == "500" else by_set[name].get(rows) for name in learnable]
        picked = [made for made in picked if made]
        ways = [way for way in WAYS if all(way in made["accuracy"] for made in picked)]
        means[rows] = {
            "sets": len(picked),
            "accuracy": {way: _mean([made["accuracy"][way][0] for made in picked]) for way in ways},
            "share_of_full_depth": _mean([made["share_of_full_depth"] for made in picked]),
            "stages_share_of_full_depth": _mean([made["stages_share_of_full_depth"] for made in picked]),
            "calibration_error": _mean([made["calibration_error"] for made in picked]),
            "kept_at_10_review": _mean([made["kept_at_10_review"] for made in picked]),
        }
    accuracy = {name: made["accuracy"]["head"][0] for name, made in at_500.items()}
    return {"zero_shot": results["zero_shot"], "by_set": by_set, "means": means, "accuracy": accuracy}


def _summary(records: list[dict]) -> dict:
    accuracies = {
        way: [record["right"][way].count("1") / record["test"] for record in records]
        for way in WAYS
        if way in records[0]["right"]
    }
    confidence = np.concatenate([record["head"]["confidence"] for record in records])
    correct = np.concatenate([_bools(record["right"]["head"]) for record in records])
    kept = [_kept_at_review(record) for record in records]
    promised = [record["head"].get("promised_90") for record in records]
    promised = [pair for pair in promised if pair]
    return {
        "rows": records[0]["rows"],
        "accuracy": {way: [_mean(values), round(float(np.std(values)), 4)] for way, values in accuracies.items()},
        "calibration_error": round(expected_calibration_error(confidence, correct), 4),
        "kept_at_10_review": _mean(kept),
        "share_of_full_depth": _mean([record["head"]["share_of_full_depth"] for record in records]),
        "stages_share_of_full_depth": _mean([r["full depth in stages"]["share_of_full_depth"] for r in records]),
        "refused": sum(record["refused"] for record in records),
        "promised_90": [sum(pair[0] for pair in promised), sum(pair[1] for pair in promised)],
        "fit_seconds": _mean([record["fit_seconds"] for record in records]),
    }


def _kept_at_review(record: dict) -> float:
    order = np.argsort(record["head"]["confidence"], kind="stable")
    return float(_bools(record["right"]["head"])[order[len(order) // 10 :]].mean())


def markdown(stamp: dict, summary: dict) -> str:
    """The label part of the page."""
    lines = [
        "## Labels that are right",
        "",
        f"`python -m benchmarks.bench_labels`, commit {stamp['commit']}, {stamp['model']}, {stamp['seeds']} seeds, train and "
        "test rows disjoint by text, at most 256 tokens a ticket. Means over seeds, spread in brackets. `TF-IDF`: words, word "
        "pairs and character 2- to 5-grams with logistic regression, the better of two strengths over all sets. `head`: what "
        "`fit-labels` makes with its defaults, early exit on. `full depth`: the head of the last layer for every ticket. "
        "Smaller sets have fewer than 500 rows to train on: then all of them.",
        "",
        "| set | labelled rows | largest class | naive Bayes | TF-IDF | text alone | **head** | full depth | layers run "
        "| calibration error | right at 10 % review |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, made in summary["by_set"].items():
        lines += [_row(name, rows, scores) for rows, scores in made.items()]
    for rows, mean in summary["means"].items():
        a = {way: f"{value:.3f}" for way, value in mean["accuracy"].items()}
        tfidf = _better({way: [v] for way, v in mean["accuracy"].items()})
        lines.append(
            f"| **mean of {mean['sets']} learnable sets** | {rows} | {a.get('largest class', '-')} | {a.get('naive Bayes', '-')} "
            f"| {tfidf} | {a['text alone']} | **{a['head']}** | {a['always full depth']} | {mean['share_of_full_depth']:.0%} "
            f"| {mean['calibration_error']:.3f} | {mean['kept_at_10_review']:.3f} |"
        )
    lines += [
        "",
        "### No labelled ticket at all",
        "",
        "| set | label scores, raw | mean subtracted | head from descriptions |",
    ]
    lines.append("|---|---:|---:|---:|")
    for name, zero in summary["zero_shot"].items():
        ours = summary["by_set"][name].get("0")
        lines.append(f"| {name} | {zero['raw']:.3f} | {zero['calibrated']:.3f} | {ours['accuracy']['head'][0]:.3f} |")
    lines += [
        "",
        "### Promised precision 0.90 on rows never seen",
        "",
        "| set | labelled rows | kept | right of the kept |",
    ]
    lines.append("|---|---:|---:|---:|")
    for name, made in summary["by_set"].items():
        for rows, scores in made.items():
            kept, right = scores["promised_90"]
            if kept:
                lines.append(f"| {name} | {rows} | {kept} | {right / kept:.3f} |")
    refused = [
        f"{name} at {rows} rows {s['refused']} times"
        for name, m in summary["by_set"].items()
        for rows, s in m.items()
        if s["refused"]
    ]
    lines += ["", f"Refused as unlearnable: {'; '.join(refused) or 'none'}."]
    return "\n".join(lines)


def _row(name: str, rows: str, scores: dict) -> str:
    cells = {way: f"{mean:.3f} ({spread:.3f})" for way, (mean, spread) in scores["accuracy"].items()}
    label = f"all {scores['rows']}" if rows == "all" else rows
    return (
        f"| {name} | {label} | {cells.get('largest class', '-')} | {cells.get('naive Bayes', '-')} "
        f"| {_better(scores['accuracy'])} | {cells['text alone']} | **{cells['head']}** | {cells['always full depth']} "
        f"| {scores['share_of_full_depth']:.0%} | {scores['calibration_error']:.3f} | {scores['kept_at_10_review']:.3f} |"
    )


def _better(accuracy: dict) -> str:
    both = [accuracy[way] for way in ("TF-IDF C=10", "TF-IDF C=100") if way in accuracy]
    if not both:
        return "-"
    best = max(both)
    return f"{best[0]:.3f}" + (f" ({best[1]:.3f})" if len(best) > 1 else "")


def _bools(bits: str) -> np.ndarray:
    return np.frombuffer(bits.encode(), dtype=np.uint8) == ord("1")


def _mean(values: list[float]) -> float:
    return round(float(np.mean(values)), 4)


def _without_bits(records: list[dict]) -> list[dict]:
    """Records with accuracies for single answers and without confidences: small enough to keep."""
    kept = []
    for record in records:
        right = {way: round(bits.count("1") / record["test"], 4) for way, bits in record["right"].items()}
        heads = {
            name: {key: value for key, value in record[name].items() if key != "confidence"}
            for name in ("head", "full depth in stages")
        }
        kept.append({**record, **heads, "right": right})
    return kept


def _commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    ).stdout.strip()
