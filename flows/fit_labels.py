"""The flow that fits a head on labelled tickets. The command line beside it is `flows.fit_cli`."""

from pathlib import Path

from prefect import flow

from tasks.fit import collect, fit, prepare_fit, read_gold, show_head, tokenize_gold, write_head
from ticket_engine.fit_settings import FitSettings
from ticket_engine.head_files import claimed_head


@flow(name="fit-labels", validate_parameters=True)
def fit_labels(settings: FitSettings) -> dict:
    """Learn from labelled tickets which layers to run and when to stop, and write a head folder.

    Returns:
        What fitting measured.

    Raises:
        UserError: Something that the caller can put right; also when nothing can be learnt from the labels.
    """
    output = Path(settings.output)
    with claimed_head(output) as folder:
        layers = prepare_fit(settings, folder)
        read_gold(settings, folder)
        tokenize_gold(folder)
        rows_hash = collect(settings, folder, layers)
        report = fit(settings, folder, layers, rows_hash)
        write_head(folder, output)
        show_head(report, output)
    return report


if __name__ == "__main__":
    from flows.fit_cli import main

    main()
