"""The command line of `python -m flows.classify_tickets`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from flows.exits import run_app
from ticket_engine.publish import find_damage, read_manifest
from ticket_engine.settings import RunSettings

DEFAULTS = {name: field.default for name, field in RunSettings.model_fields.items()}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings={"max_content_width": 100})


def _option(name: str, *flags: str) -> typer.models.OptionInfo:
    field = RunSettings.model_fields[name]
    return typer.Option(*flags, help=field.description, show_default=True)


@app.callback(invoke_without_command=True)
def classify(
    context: typer.Context,
    input: Annotated[str | None, _option("input", "--input")] = None,
    labels: Annotated[str | None, _option("labels", "--labels")] = None,
    output: Annotated[str | None, _option("output", "--output")] = None,
    model: Annotated[str, _option("model", "--model")] = DEFAULTS["model"],
    head: Annotated[str | None, _option("head", "--head")] = None,
    review_precision: Annotated[float | None, _option("review_precision", "--review-precision")] = None,
    review_budget: Annotated[float | None, _option("review_budget", "--review-budget")] = None,
    id_column: Annotated[str, _option("id_column", "--id-column")] = DEFAULTS["id_column"],
    text_columns: Annotated[str, _option("text_columns", "--text-columns")] = ",".join(DEFAULTS["text_columns"]),
    execution: Annotated[str, _option("execution", "--execution")] = DEFAULTS["execution"],
    dtype: Annotated[str, _option("dtype", "--dtype")] = DEFAULTS["dtype"],
    threads: Annotated[int | None, _option("threads", "--threads")] = None,
    workers: Annotated[int | None, _option("workers", "--workers")] = None,
    runner: Annotated[str, _option("runner", "--runner")] = DEFAULTS["runner"],
    runner_address: Annotated[str | None, _option("runner_address", "--runner-address")] = None,
    batch_size: Annotated[int | None, _option("batch_size", "--batch-size")] = None,
    token_budget: Annotated[int | None, _option("token_budget", "--token-budget")] = None,
    max_buckets: Annotated[int, _option("max_buckets", "--max-buckets")] = DEFAULTS["max_buckets"],
    max_ticket_tokens: Annotated[int, _option("max_ticket_tokens", "--max-ticket-tokens")] = DEFAULTS[
        "max_ticket_tokens"
    ],
    truncate: Annotated[str, _option("truncate", "--truncate")] = DEFAULTS["truncate"],
    prefix_cache: Annotated[bool, _option("prefix_cache", "--prefix-cache/--no-prefix-cache")] = True,
    limit: Annotated[int | None, _option("limit", "--limit")] = None,
    spot_check: Annotated[int, _option("spot_check", "--spot-check")] = DEFAULTS["spot_check"],
    min_agreement: Annotated[float, _option("min_agreement", "--min-agreement")] = DEFAULTS["min_agreement"],
    seed: Annotated[int, _option("seed", "--seed")] = DEFAULTS["seed"],
    run_date: Annotated[str | None, _option("run_date", "--run-date")] = None,
    time_zone: Annotated[str | None, _option("time_zone", "--time-zone")] = None,
    store: Annotated[str | None, _option("store", "--store")] = None,
    store_days: Annotated[int, _option("store_days", "--store-days")] = DEFAULTS["store_days"],
    tickets_contract: Annotated[str, _option("tickets_contract", "--tickets-contract")] = DEFAULTS["tickets_contract"],
    predictions_contract: Annotated[str, _option("predictions_contract", "--predictions-contract")] = DEFAULTS[
        "predictions_contract"
    ],
    contract_parameter: Annotated[
        list[str] | None, typer.Option("--contract-parameter", help="NAME=NUMBER, may be given again.")
    ] = None,
    compare_with: Annotated[str | None, _option("compare_with", "--compare-with")] = DEFAULTS["compare_with"],
    on_drift: Annotated[str, _option("on_drift", "--on-drift")] = DEFAULTS["on_drift"],
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the flow's log.")] = False,
) -> None:
    """Label every ticket of a table and publish the labels with proof.

    Exit code 0: published. 2: something to put right. 3: validation refused to publish.
    """
    if context.invoked_subcommand is not None:
        return
    missing = [f"--{name}" for name in ("input", "labels", "output") if context.params[name] is None]
    if missing:
        raise typer.BadParameter(f"Missing {', '.join(missing)}. See --help.")
    given = {name: value for name, value in context.params.items() if name in RunSettings.model_fields}
    given["text_columns"] = tuple(part.strip() for part in text_columns.split(",") if part.strip())
    given["contract_parameters"] = dict(_number(pair) for pair in contract_parameter or [])
    from flows.classify_tickets import classify_tickets

    print(report(classify_tickets(RunSettings(**given))))


@app.command()
def check(folder: Annotated[Path, typer.Argument(help="A published folder.")]) -> None:
    """Check a published folder against its manifest: files, hashes, counts and contract."""
    from data_contracts.checks import check_published

    problems = find_damage(folder) or check_published(folder, read_manifest(folder))
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        raise typer.Exit(3)
    print(f"{folder} is as it was published and its contract holds.")


def report(manifest: dict) -> str:
    """What a run prints at its end."""
    from tasks.artifacts import check_words

    rows, plan, seconds = manifest["rows"], manifest["plan"], manifest["seconds"]
    speed = manifest["tickets_per_second"]
    counts = ", ".join(f"{name} {count}" for name, count in sorted(manifest["labels"].items(), key=lambda x: -x[1]))
    lines = [
        ("rows", f"{rows['input']} read, {rows['predictions']} labelled, {rows['quarantine']} in quarantine"),
        ("labels", counts),
        (
            "padding",
            f"{plan['padding_overhead']:.1%} as planned; {plan['padding_overhead_published']:.1%} in sorted batches of "
            f"32; {1 + plan['padding_overhead_longest']:.1f} x the tokens if all were padded to the longest",
        ),
        (
            "speed",
            f"{speed:.1f} tickets a second in {seconds['classify']:.1f} s"
            if speed
            else f"nothing to compute: {plan['stored']} different texts were known, {plan['by_text']} decided by their text",
        ),
        (
            "engine",
            f"{manifest['execution']}, {manifest['dtype']}, {manifest['workers']} passes at once, {manifest['threads']} thread(s) each"
            + (f"; not packed: {manifest['execution_reason']}" if manifest["execution_reason"] else ""),
        ),
        *_head_lines(manifest),
        ("agreement", check_words(manifest["spot_check"])),
        ("output", manifest["settings"]["output"]),
    ]
    return "\n".join(f"{name:<10} {text}" for name, text in lines)


def _head_lines(manifest: dict) -> list[tuple[str, str]]:
    head, review = manifest["head"], manifest["review"]
    lines = []
    if head:
        shares = ", ".join(
            f"{count} {'by text alone' if depth == '0' else f'after layer {depth}'}"
            for depth, count in head["tickets_by_layers"].items()
        )
        lines.append(("head", f"{shares}; {head['share_of_full_depth']:.0%} of the work of {head['layers']} layers"))
    if review["needs_review"] is not None:
        words = f"{review['needs_review']} tickets for people in review.parquet; {review['review_words']}"
        lines.append(("review", words))
    return lines


def _number(pair: str) -> tuple[str, float]:
    name, separator, value = pair.partition("=")
    try:
        return name, float(value) if separator else float("nan")
    except ValueError:
        raise typer.BadParameter(f"{pair!r} is not NAME=NUMBER.") from None


def main() -> None:
    """Run the command line."""
    run_app(app, "flows.classify_tickets")
