"""Column names and types of every table that leaves a stage.

Files of one run, all Parquet, in its working folder::

    columns.json        names and types of the input's columns                  (read)
    tickets.parquet     ticket_id, input_index, text                            (read)
    quarantine.parquet  the input row, whole, and reason                        (read)
    tokens.parquet      ticket_id, input_index, ticket_key, token_length, is_truncated, token_ids;
                        text too where a head reads it                          (tokenize)
    by_text.parquet     ticket_key and scores of tickets that need no model      (decide-by-text)
    buckets/NNN.parquet ticket_key, token_length, token_ids, batch_index, text   (bucket)
    parts/KEY.parquet   ticket_key, one log-probability a label, stage           (classify)
    predictions.parquet what is published                                        (gather)

Whatever the id column is called in the input, it is ``ticket_id`` in these files; only what is published (predictions,
review, quarantine) has the caller's name. So no name of theirs can be taken for one of ours.
"""

from typing import Final

import polars as pl

TICKET_ID: Final = "ticket_id"
INPUT_INDEX: Final = "input_index"
USED_DAY: Final = "used_day"
TEXT: Final = "text"
REASON: Final = "reason"
TICKET_KEY: Final = "ticket_key"
TOKEN_IDS: Final = "token_ids"
TOKEN_LENGTH: Final = "token_length"
IS_TRUNCATED: Final = "is_truncated"
BUCKET_INDEX: Final = "bucket_index"
BATCH_INDEX: Final = "batch_index"
LABEL: Final = "label"
PROBABILITY: Final = "probability"
MARGIN: Final = "margin"
LOG_PROBS: Final = "log_probs"
STAGE: Final = "stage"
NEEDS_REVIEW: Final = "needs_review"

PREDICTIONS_FILE: Final = "predictions.parquet"
QUARANTINE_FILE: Final = "quarantine.parquet"
REVIEW_FILE: Final = "review.parquet"
MANIFEST_FILE: Final = "manifest.json"

OUTPUT_COLUMNS: Final = frozenset(
    {LABEL, PROBABILITY, MARGIN, LOG_PROBS, TOKEN_LENGTH, IS_TRUNCATED, BUCKET_INDEX, STAGE, NEEDS_REVIEW}
)

ID_TYPES: Final = (pl.String, pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32, pl.UInt64)

REASON_NULL_ID: Final = "null id"
REASON_REPEATED_ID: Final = "repeated id"
REASON_NO_TEXT: Final = "no text"
REASON_PROMPT_BOUNDARY: Final = "text merges with the prompt"
REASON_NOT_FINITE: Final = "scores are not finite"


def predictions_schema(
    id_column: str, id_type: pl.DataType, labels: tuple[str, ...], *, has_head: bool = False
) -> pl.Schema:
    """Columns and types of ``predictions.parquet``, in order.

    ``log_probs`` is a struct with one float32 field a label, natural log, normalised over the label
    set: the exponentials of a row sum to 1. ``probability`` is the largest of them, ``margin`` its
    lead in probability over the second label. Rows stand in input order. With a head, ``stage`` is the
    number of layers after which the ticket was decided, 0 for its text alone.
    """
    return pl.Schema(
        {
            id_column: id_type,
            LABEL: pl.String(),
            PROBABILITY: pl.Float32(),
            MARGIN: pl.Float32(),
            LOG_PROBS: pl.Struct({label: pl.Float32() for label in labels}),
            TOKEN_LENGTH: pl.UInt32(),
            IS_TRUNCATED: pl.Boolean(),
            BUCKET_INDEX: pl.UInt32(),
        }
        | ({STAGE: pl.Int16()} if has_head else {})
    )
