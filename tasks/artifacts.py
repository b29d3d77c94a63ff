"""What the Prefect UI shows of a run: markdown and tables, no ticket text."""

from pathlib import Path

from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact

from tasks.pictures import PICTURE, as_markdown
from ticket_engine.bucket_files import BucketPlan

MOST_ROWS = 256


def show_plan(plan: BucketPlan) -> None:
    """The bucket plan as a table, a row a bucket."""
    rows = [
        {
            "bucket": bucket.index,
            "tickets": bucket.tickets,
            "batches": bucket.batches,
            "shortest (tokens)": bucket.shortest,
            "longest (tokens)": bucket.longest,
            "tokens": bucket.real_tokens,
        }
        for bucket in plan.buckets[:MOST_ROWS]
    ]
    create_table_artifact(rows, key="bucket-plan", description="Buckets of this run, longest tickets first")


def show_run(manifest: dict) -> None:
    """The summary of a published run, its spot check, and links to its folder and pages."""
    output = Path(manifest["settings"]["output"]).resolve()
    text = run_markdown(manifest) + "\n\n" + as_markdown(output / PICTURE)
    create_markdown_artifact(text, key="run-summary", description="Run summary")
    create_table_artifact(contract_rows(manifest), key="contracts", description="What was expected and what was found")
    per_bucket = manifest["spot_check"].get("per_bucket") or []
    create_table_artifact(list(per_bucket), key="spot-check", description="Spot check by bucket")
    create_link_artifact(output.as_uri(), key="output-folder", link_text="Output folder", description="Published files")
    page = output / "data_docs" / "index.html"
    create_link_artifact(page.as_uri(), key="contract-pages", link_text="Contract pages", description="Data Docs")


def contract_rows(manifest: dict) -> list[dict]:
    """A row an expectation of both contracts, what came of it first: the UI cuts long rows."""
    return [
        {
            "verdict": "passed" if item["passed"] else item["severity"],
            "contract": stage,
            "what is expected": item["name"],
            "found": item["observed"],
        }
        for stage, report in manifest["contracts"].items()
        for item in report["expectations"]
    ]


def run_markdown(manifest: dict) -> str:
    """A run in words and tables that a support lead understands."""
    rows, check, plan = manifest["rows"], manifest["spot_check"], manifest["plan"]
    total = max(1, rows["predictions"])
    labels = sorted(manifest["labels"].items(), key=lambda item: -item[1])
    lines = [
        f"# {rows['predictions']} tickets labelled, {rows['quarantine']} in quarantine",
        "",
        f"Run date {manifest['run_date']}, model {manifest['model']['name']} ({manifest['dtype']}, "
        f"{manifest['execution']}), published to `{manifest['settings']['output']}`.",
        "",
        "| label | tickets | share |",
        "|---|---:|---:|",
        *[f"| {name} | {count} | {count / total:.1%} |" for name, count in labels],
        "",
        "| proof | |",
        "|---|---|",
        f"| Spot check | {check_words(check)} |",
        f"| Coverage | {rows['input']} input rows, each with one outcome |",
        f"| Truncated tickets | {rows['truncated']} |",
        "",
        "| work | |",
        "|---|---|",
        f"| Different tickets scored by the model / decided by their text / known before | "
        f"{plan['distinct'] - plan['stored'] - plan['by_text']} / {plan['by_text']} / {plan['stored']} |",
        f"| Batches, buckets | {plan['batches']}, {plan['buckets']} |",
        f"| Padding overhead | {plan['padding_overhead']:.1%} (batches of 32: "
        f"{plan['padding_overhead_published']:.1%}, all to the longest: {1 + plan['padding_overhead_longest']:.1f} x) |",
        f"| Tickets a second | {manifest['tickets_per_second'] or 'none scored'} |",
        f"| Seconds | {', '.join(f'{stage} {value:.1f}' for stage, value in manifest['seconds'].items())} |",
    ]
    return "\n".join(lines)


def check_words(check: dict) -> str:
    """The spot check in one phrase."""
    if not check["sampled"]:
        return "none taken"
    ties = f", {check['near_ties']} within rounding of two labels" if check["near_ties"] else ""
    exact = f" ({check['float32_sampled']} in float32 too)" if check["float32_sampled"] else ""
    return (
        f"{check['agreement']:.3f}: of {check['sampled']} tickets scored again by the slow scorer{exact} {check['agreed']} got "
        f"the same label{ties}, {check['disagreed']} another; at most {check['upper_bound']:.1%} of all differ "
        f"({check['confidence']:.0%} confidence)"
    )
