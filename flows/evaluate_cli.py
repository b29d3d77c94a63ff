"""The command line of `python -m flows.evaluate`."""

from typing import Annotated

import typer

from flows.exits import quiet_console, run_app
from ticket_engine.evaluate_settings import EvaluateSettings

DEFAULTS = {name: field.default for name, field in EvaluateSettings.model_fields.items()}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings={"max_content_width": 100})


def _option(name: str) -> typer.models.OptionInfo:
    field = EvaluateSettings.model_fields[name]
    return typer.Option("--" + name.replace("_", "-"), help=field.description or field.title)


@app.command()
def evaluate(
    predictions: Annotated[str, _option("predictions")],
    gold: Annotated[str, _option("gold")],
    output: Annotated[str, _option("output")] = "out/evaluation",
    other: Annotated[str | None, _option("other")] = None,
    id_column: Annotated[str, _option("id_column")] = DEFAULTS["id_column"],
    gold_column: Annotated[str, _option("gold_column")] = DEFAULTS["gold_column"],
    text_columns: Annotated[str, _option("text_columns")] = ",".join(DEFAULTS["text_columns"]),
    group_column: Annotated[str | None, _option("group_column")] = None,
    group_pattern: Annotated[str | None, _option("group_pattern")] = None,
    seed: Annotated[int, _option("seed")] = DEFAULTS["seed"],
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the flow's log.")] = False,
) -> None:
    """Measure a run's labels against labels that people gave.

    Exit code 0: measured. 2: something to put right.
    """
    given = {name: value for name, value in locals().items() if name in EvaluateSettings.model_fields}
    given["text_columns"] = tuple(part.strip() for part in text_columns.split(",") if part.strip())
    if not verbose:
        quiet_console()
    from flows.evaluate import evaluate_labels

    print("\n".join([*evaluate_labels(EvaluateSettings(**given)), f"page: {output}/index.html"]))


def main() -> None:
    """Run the command line."""
    run_app(app, "flows.evaluate")
