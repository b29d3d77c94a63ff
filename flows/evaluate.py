"""The flow that measures a run's labels against gold labels. The command line beside it is `flows.evaluate_cli`."""

from pathlib import Path

from prefect import flow

from tasks.evaluate import compare, lines, score, show, write
from ticket_engine.evaluate_settings import EvaluateSettings


@flow(name="evaluate-labels", validate_parameters=True)
def evaluate_labels(settings: EvaluateSettings) -> list[str]:
    """Measure how right a run's labels are, compare them with other answers, and write a page.

    Returns:
        The main facts in words, one a line.

    Raises:
        UserError: A table or column is missing, or the two tables share no ticket.
    """
    evaluation = score(settings)
    compared = compare(settings)
    pictures = write(evaluation, compared, Path(settings.output))
    show(evaluation, compared, pictures)
    return lines(evaluation, compared)


if __name__ == "__main__":
    from flows.evaluate_cli import main

    main()
