"""Fit: labelled tickets become a head. One task a stage, one engine call a task."""

import json
from pathlib import Path

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE

from tasks.timing import read_seconds, stage_seconds
from ticket_engine.fit_settings import FitSettings
from ticket_engine.head_files import put_head, save_head
from ticket_engine.labelled import LabelledSummary, read_labelled
from ticket_engine.labels import kept_labels
from ticket_engine.learnability import CHANCE
from ticket_engine.tokenization import TokenizeSummary

STAGED = "head"


@task(name="prepare-model", task_run_name="prepare-model", cache_policy=NO_CACHE)
def prepare_fit(settings: FitSettings, folder: Path) -> int:
    """Write the engine's spec; the number of the model's layers."""
    from ticket_engine.fitting_features import count_layers
    from ticket_engine.preparation import prepare_engine

    with stage_seconds(folder, "prepare"):
        spec = prepare_engine(settings.run_settings(), folder)
    return count_layers(Path(spec.model_folder))


@task(name="read-labelled", task_run_name="read-labelled", cache_policy=NO_CACHE)
def read_gold(settings: FitSettings, folder: Path) -> LabelledSummary:
    """Tickets and their labels."""
    with stage_seconds(folder, "read"):
        summary = read_labelled(
            settings.input,
            folder,
            id_column=settings.id_column,
            text_columns=settings.text_columns,
            label_column=settings.label_column,
            labels=kept_labels(folder).names,
            add=settings.add,
            limit=settings.limit,
        )
    get_run_logger().info(
        "%d rows: %d tickets, %d with a label, %d in quarantine, %d replaced by reviewed ones",
        summary.rows,
        summary.tickets,
        summary.labelled,
        summary.quarantined,
        summary.replaced,
    )
    return summary


@task(name="tokenize", task_run_name="tokenize", cache_policy=NO_CACHE)
def tokenize_gold(folder: Path) -> TokenizeSummary:
    """Tokens of the labelled tickets."""
    from ticket_engine import stages

    with stage_seconds(folder, "tokenize"):
        return stages.tokenize(folder)


@task(name="collect-features", task_run_name="collect-features", cache_policy=NO_CACHE)
def collect(settings: FitSettings, folder: Path, layers: int) -> str:
    """Hidden states of the tickets in one pass; the hash of the labelled rows."""
    from ticket_engine.fitting_features import choose_rows, collect_fitting_rows
    from ticket_engine.head_fitting import MOST_ROWS

    with stage_seconds(folder, "collect"):
        rows = choose_rows(folder, MOST_ROWS, settings.seed)
        labels = kept_labels(folder).labels
        rows_hash = collect_fitting_rows(folder, labels, _rule(settings, layers).depths, rows)
    get_run_logger().info("Hidden states of %d different tickets", len(rows))
    return rows_hash


@task(name="fit-head", task_run_name="fit-head", cache_policy=NO_CACHE)
def fit(settings: FitSettings, folder: Path, layers: int, rows_hash: str) -> dict:
    """Choose depth, blend and thresholds on held-out rows, and stage the head; what was measured."""
    from ticket_engine.engine_spec import read_spec
    from ticket_engine.fitting_features import read_fitting_rows
    from ticket_engine.head_fitting import fit_head
    from ticket_engine.heads import HeadIdentity

    spec = read_spec(folder)
    identity = HeadIdentity(spec.model_hash, spec.prompt.content_hash, spec.labels_hash, rows_hash)
    with stage_seconds(folder, "fit"):
        tickets, label_rows = read_fitting_rows(folder, kept_labels(folder).labels)
        head = fit_head(tickets, label_rows, spec.labels, rule=_rule(settings, layers), identity=identity)
        save_head(head, folder / STAGED)
    stages = [{"depth": stage.depth, "threshold": stage.threshold} for stage in head.stages]
    return {**head.report, "stages": stages, "seconds": read_seconds(folder)}


@task(name="write-head", task_run_name="write-head", cache_policy=NO_CACHE)
def write_head(folder: Path, output: Path) -> None:
    """Put the head into its folder, checked as it was read back."""
    put_head(folder / STAGED, output)
    get_run_logger().info("Head written to %s", output)


def show_head(report: dict, output: Path) -> None:
    """What fitting measured, as artifacts of the run."""
    text = "\n".join(f"- {line}" for line in report_lines(report))
    create_markdown_artifact(text, key="fitted-head", description=f"Head in {output.name}")
    rows = [{"depth": int(depth), **values} for depth, values in report.get("held_out", {}).items()]
    if rows:
        create_table_artifact(rows, key="held-out-by-depth", description="Held-out accuracy, log loss, calibration")


def report_lines(report: dict) -> list[str]:
    """A report in words, one line a fact."""
    lines = [f"tickets    {report['labelled_tickets']} different labelled ones"]
    if report["labels_without_tickets"]:
        missing = report["labels_without_tickets"]
        shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        lines.append(f"no ticket  {len(missing)} labels rest on their description alone: {shown}")
    for depth, values in report.get("held_out", {}).items():
        name = "text alone" if depth == "0" else f"layer {depth}"
        lines.append(f"{name:<10} held-out accuracy {values['accuracy']:.3f}, log loss {values['log_loss']:.3f}")
    for stage in report["stages"]:
        share = report.get("share_deciding", {}).get(str(stage["depth"]))
        decides = "not measured" if share is None else f"decides {share:.0%}"
        lines.append(f"stage      depth {stage['depth']} of {report['layers']}: {decides}")
    if "share_of_full_depth" in report:
        lines.append(f"cost       {report['share_of_full_depth']:.0%} of the layers that full depth runs")
    chance, few = report["chance_of_random_labels"], report["labelled_tickets"] < report["fewest_to_judge"]
    if chance is None or (chance > CHANCE and few):
        lines.append(
            f"unproven   whether anything can be learnt cannot be judged below {report['fewest_to_judge']} labelled tickets"
        )
    elif chance > CHANCE:
        lines.append("unproven   labels in random order fit these texts about as well; more rows are needed")
    promise = report["promise"]
    lines.append(
        f"promise    a precision promised later rests on {promise['held_out_tickets']} held-out tickets that chose nothing, "
        f"at {promise['confidence']:.0%} confidence"
        if promise["held_out_tickets"]
        else "promise    too few labelled tickets to promise a precision"
    )
    lines.append("seconds    " + json.dumps(report["seconds"]))
    return lines


def _rule(settings: FitSettings, layers: int):
    from ticket_engine.head_fitting import FitRule

    return FitRule(
        layers=layers,
        depth=settings.depth,
        allowed_loss=settings.allowed_loss,
        unproven=settings.unproven,
        seed=settings.seed,
    )
