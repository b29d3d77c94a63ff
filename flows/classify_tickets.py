"""The flow: tickets in Parquet to checked labels in Parquet. The command line beside it is `flows.cli`."""

from pathlib import Path

from prefect import flow

from tasks.artifacts import show_plan, show_run
from tasks.bucket import bucket, decide_by_text, find_scored
from tasks.classify import classify_buckets
from tasks.naming import name_run, scheduled_day, start_name
from tasks.prepare import prepare
from tasks.read import read
from tasks.tokenize import tokenize
from tasks.validate import check_input, check_output, gather, spot_check
from tasks.write import refuse_unless, write
from ticket_engine.publish import claimed_output
from ticket_engine.settings import RunSettings


@flow(name="classify-tickets", flow_run_name=start_name, validate_parameters=True)
def classify_tickets(settings: RunSettings) -> dict:
    """Label every ticket of a table, prove the labels against the slow scorer, and publish them.

    Returns:
        The manifest of the published run.

    Raises:
        UserError: Something in settings, input, labels or model that the caller can put right.
        RefusedError: A contract does not hold; nothing was published.
    """
    settings = settings.resolved(scheduled_day(settings.zone()))
    output, store = Path(settings.output), Path(settings.store)
    with claimed_output(output) as folder:
        rows = read(settings, folder)
        name_run(settings, rows)
        workers = prepare(settings, folder)
        tokens = tokenize(folder)
        incoming = check_input(settings, folder, rows)
        refuse_unless(incoming, folder, output)
        find_scored(folder, store)
        decide_by_text(settings, folder)
        plan = bucket(settings, folder)
        show_plan(plan)
        classify_buckets(settings, plan, folder, store, workers)
        counts = gather(settings, folder, store)
        checked = spot_check(settings, folder)
        outgoing = check_output(settings, folder, checked, incoming, rows.rows)
        refuse_unless(outgoing, folder, output)
        manifest = write(settings, folder, (rows, tokens, plan, counts, checked, incoming, outgoing))
        show_run(manifest)
    return manifest


if __name__ == "__main__":
    from flows.cli import main

    main()
