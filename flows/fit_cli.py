"""The command line of `python -m flows.fit_labels`."""

from typing import Annotated

import typer

from flows.exits import quiet_console, run_app
from ticket_engine.fit_settings import FitSettings

DEFAULTS = {name: field.default for name, field in FitSettings.model_fields.items()}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings={"max_content_width": 100})


def _option(name: str) -> typer.models.OptionInfo:
    field = FitSettings.model_fields[name]
    return typer.Option("--" + name.replace("_", "-"), help=field.description or field.title)


@app.command()
def fit(
    input: Annotated[str, _option("input")],
    labels: Annotated[str, _option("labels")],
    output: Annotated[str, _option("output")],
    label_column: Annotated[str, _option("label_column")] = DEFAULTS["label_column"],
    add: Annotated[str | None, _option("add")] = None,
    model: Annotated[str, _option("model")] = DEFAULTS["model"],
    id_column: Annotated[str, _option("id_column")] = DEFAULTS["id_column"],
    text_columns: Annotated[str, _option("text_columns")] = ",".join(DEFAULTS["text_columns"]),
    depth: Annotated[str, _option("depth")] = DEFAULTS["depth"],
    allowed_loss: Annotated[float, _option("allowed_loss")] = DEFAULTS["allowed_loss"],
    unproven: Annotated[
        bool, typer.Option("--unproven", help=FitSettings.model_fields["unproven"].description)
    ] = False,
    dtype: Annotated[str, _option("dtype")] = DEFAULTS["dtype"],
    threads: Annotated[int | None, _option("threads")] = None,
    max_ticket_tokens: Annotated[int, _option("max_ticket_tokens")] = DEFAULTS["max_ticket_tokens"],
    truncate: Annotated[str, _option("truncate")] = DEFAULTS["truncate"],
    limit: Annotated[int | None, _option("limit")] = None,
    seed: Annotated[int, _option("seed")] = DEFAULTS["seed"],
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the flow's log.")] = False,
) -> None:
    """Fit a head on labelled tickets, from hidden states and words; classify-tickets does not apply it yet.

    Exit code 0: written. 2: something to put right, or nothing can be learnt from these labels.
    """
    given = {name: value for name, value in locals().items() if name in FitSettings.model_fields}
    given["text_columns"] = tuple(part.strip() for part in text_columns.split(",") if part.strip())
    if not verbose:
        quiet_console()
    from flows.fit_labels import fit_labels
    from tasks.fit import report_lines

    print("\n".join([*report_lines(fit_labels(FitSettings(**given))), f"head       {output}"]))


def main() -> None:
    """Run the command line."""
    run_app(app, "flows.fit_labels")
