"""The settings of one fit: read once in the flow, passed down as values."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ticket_engine.settings import PRODUCTION_MODEL, RunSettings


class FitSettings(BaseModel):
    """What one run of `fit-labels` does. Prefect's parameter form is made from this model."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    input: str = Field(
        title="Labelled tickets",
        description="Parquet, as for classify-tickets, with one more column. Rows without a label are allowed: "
        "they make the scaling surer.",
    )
    labels: str = Field(title="Labels file", description="YAML file with the labels and their descriptions.")
    output: str = Field(title="Head folder", description="Where head.safetensors and head.json are written.")
    label_column: str = Field(default="label", title="Label column", description="Label names; null where unknown.")
    add: str | None = Field(
        default=None,
        title="Reviewed tickets",
        description="A second table with the same columns, such as a run's review.parquet. Its labelled rows stand in "
        "for input rows of the same id; rows that nobody labelled are passed over.",
    )
    model: str = Field(default=PRODUCTION_MODEL, title="Model", description="The model that runs will use.")
    id_column: str = Field(default="ticket_id", title="Id column", description="Unique and not null.")
    text_columns: tuple[str, ...] = Field(default=("subject", "body"), min_length=1, title="Text columns")
    depth: Literal["auto", "best"] | int = Field(
        default="auto",
        title="Depth",
        description="Layers of the last stage. auto: the cheapest that the best does not beat by one standard "
        "error; best: the least held-out log loss; or a number, 0 for the text alone.",
    )
    allowed_loss: float = Field(
        default=0.005, ge=0, le=0.2, title="Allowed loss", description="Accuracy that deciding early may cost."
    )
    unproven: bool = Field(
        default=False, title="Unproven", description="Fit even if the labels cannot be told from random ones."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(default="auto", title="Number format")
    threads: int | None = Field(default=None, ge=1, le=512, title="Threads")
    max_ticket_tokens: int = Field(default=1024, ge=1, title="Longest ticket")
    truncate: Literal["end", "middle"] = Field(default="end", title="Cut from")
    limit: int | None = Field(default=None, ge=1, title="Limit", description="Only the first rows of the table.")
    seed: int = Field(default=0, ge=0, title="Seed", description="Of folds and permutations.")

    def run_settings(self) -> RunSettings:
        """The settings that make the same engine in classify-tickets."""
        shared = ("input", "labels", "output", "model", "id_column", "text_columns", "dtype", "threads")
        fields = (*shared, "max_ticket_tokens", "truncate", "limit")
        return RunSettings(**{name: getattr(self, name) for name in fields}, execution="packed")
