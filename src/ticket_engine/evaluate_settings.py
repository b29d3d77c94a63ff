"""The settings of one evaluation: read once in the flow, passed down as values."""

from pydantic import BaseModel, ConfigDict, Field


class EvaluateSettings(BaseModel):
    """What one run of `evaluate-labels` does. Prefect's parameter form is made from this model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    predictions: str = Field(title="Predictions", description="A published folder, or its predictions.parquet.")
    gold: str = Field(title="Gold labels", description="Parquet with the id column and the true labels.")
    output: str = Field(title="Output folder", description="Where evaluation.json, index.html and the pictures go.")
    other: str | None = Field(
        default=None,
        title="Other predictions",
        description="Another run over the same tickets, compared with this one.",
    )
    id_column: str = Field(default="ticket_id", title="Id column")
    gold_column: str = Field(default="label", title="Gold column", description="Of the gold table.")
    text_columns: tuple[str, ...] = Field(
        default=("subject", "body"),
        title="Text columns",
        description="Of the gold table; where it has them, naive Bayes and TF-IDF regression are measured beside the run.",
    )
    group_column: str | None = Field(
        default=None, title="Group column", description="Of the gold table, such as a language: accuracy a group."
    )
    group_pattern: str | None = Field(
        default=None,
        title="Group pattern",
        description="Regular expression whose first bracket is the group, for columns that hold more than it.",
    )
    seed: int = Field(default=0, ge=0, title="Seed", description="Of the baselines' folds.")
