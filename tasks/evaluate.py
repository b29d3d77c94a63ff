"""Evaluate: a run's labels against labels that people gave. One task a stage, one engine call a task."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from prefect import get_run_logger, task
from prefect.artifacts import create_image_artifact, create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE

from ticket_engine.answers import PAGE_FILE, count_fitted, read_answers, right_on, write_evaluation
from ticket_engine.evaluate_settings import EvaluateSettings
from ticket_engine.evaluation import (
    Comparison,
    Evaluation,
    Share,
    compare_answers,
    evaluate,
    fitted_words,
    plain_words,
    share,
)
from ticket_engine.evaluation_page import data_uri, draw_pictures, page, summary_rows

Compared = dict[str, tuple[Share, Comparison]]


@task(name="score-labels", task_run_name="score-labels", cache_policy=NO_CACHE)
def score(settings: EvaluateSettings) -> Evaluation:
    """Scores of the run."""
    answers = _answers(settings, settings.predictions)
    evaluation = evaluate(answers.joined, answers.labels, answers.missing)
    evaluation = replace(evaluation, fitted=count_fitted(settings.predictions, answers))
    get_run_logger().info("%d tickets, accuracy %s", evaluation.tickets, evaluation.accuracy)
    return evaluation


@task(name="compare-answers", task_run_name="compare-answers", cache_policy=NO_CACHE)
def compare(settings: EvaluateSettings) -> Compared:
    """The other run and the rivals that need no model, on the same tickets."""
    answers = _answers(settings, settings.predictions)
    gold = answers.joined["gold"].to_numpy()
    right = answers.joined["label"].to_numpy() == gold
    compared: Compared = {}
    if settings.other:
        ours, theirs = right_on(answers, _answers(settings, settings.other))
        compared[f"other run, {len(ours)} tickets"] = _compared(ours, theirs)
    if answers.joined["text"].null_count() == 0 and len(answers.joined) >= 10:
        from ticket_engine.baselines import baseline_answers

        for name, given in baseline_answers(answers.joined["text"].to_list(), gold, settings.seed).items():
            compared[f"{name}, trained on 4/5 of the gold rows"] = _compared(right, given == gold)
    return compared


@task(name="write-evaluation", task_run_name="write-evaluation", cache_policy=NO_CACHE)
def write(evaluation: Evaluation, compared: Compared, output: Path) -> dict[str, bytes]:
    """Page, pictures and numbers in the output folder; the pictures."""
    pictures = draw_pictures(evaluation)
    files = {f"{name}.png": png for name, png in pictures.items()}
    files[PAGE_FILE] = page(evaluation, pictures, compared).encode()
    write_evaluation(output, evaluation, compared, files)
    return pictures


def show(evaluation: Evaluation, compared: Compared, pictures: dict[str, bytes]) -> None:
    """The evaluation as artifacts of the run."""
    text = "\n".join([plain_words(evaluation), "", *(f"- {line}" for line in lines(evaluation, compared)[1:])])
    create_markdown_artifact(text, key="evaluation", description="Labels against gold labels")
    rows = [
        {
            "label": s.label,
            "tickets": s.recall.tickets,
            "precision": str(s.precision),
            "recall": str(s.recall),
            "F1": round(s.f1, 3),
        }
        for s in evaluation.per_label
    ]
    create_table_artifact(rows, key="label-scores", description="Precision and recall a label, 95 % intervals")
    for name, png in pictures.items():
        create_image_artifact(image_url=data_uri(png), key=f"picture-{name}", description=f"Picture: {name}")


def lines(evaluation: Evaluation, compared: Compared) -> list[str]:
    """An evaluation in words, one line a fact."""
    made = [plain_words(evaluation), *filter(None, [fitted_words(evaluation)])]
    made += [f"{name}: {value}" for name, value in summary_rows(evaluation)]
    for name, (accuracy, comparison) in compared.items():
        made.append(f"{name}: accuracy {accuracy}, this run {comparison.difference:+.3f}, p = {comparison.chance:.3g}")
    made += [
        f"group {name}: accuracy {accuracy}, {accuracy.tickets} tickets" for name, accuracy in evaluation.groups.items()
    ]
    made += [f"confused: {p.gold} given {p.predicted}, {p.tickets} tickets" for p in evaluation.confused[:5]]
    return made


def _answers(settings: EvaluateSettings, predictions: str):
    return read_answers(
        predictions,
        settings.gold,
        id_column=settings.id_column,
        gold_column=settings.gold_column,
        text_columns=settings.text_columns,
        group=(settings.group_column, settings.group_pattern),
    )


def _compared(ours: np.ndarray, theirs: np.ndarray) -> tuple[Share, Comparison]:
    return share(int(theirs.sum()), len(theirs)), compare_answers(ours, theirs)
