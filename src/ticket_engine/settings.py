"""The settings of one run: read once in the flow, passed down as values."""

from datetime import date
from pathlib import Path
from typing import Annotated, Literal, Self
from zoneinfo import ZoneInfo, available_timezones

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from ticket_engine.errors import SettingsError

PRODUCTION_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
EMBEDDED_MODEL = "smollm2-135m"


def _known_zone(name: str) -> str:
    if name not in available_timezones():
        raise ValueError(f"there is no time zone {name!r}: give one such as Europe/Berlin or UTC")
    return name


class RunSettings(BaseModel):
    """What one run of `classify-tickets` does. Prefect's parameter form is made from this model."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    input: str = Field(
        title="Tickets",
        description="Parquet: a file, a folder, a glob, hive partitions, or a URL such as s3://bucket/path. "
        "{run_date}, {year}, {month} and {day} are replaced by the run date.",
    )
    labels: str = Field(title="Labels file", description="YAML file with the labels and their descriptions.")
    output: str = Field(title="Output folder", description="Where the predictions are published. Takes {run_date} too.")
    run_date: str | None = Field(
        default=None,
        title="Run date",
        pattern=r"^\d{4}-\d{2}-\d{2}$",
        description="YYYY-MM-DD, fills the date templates. Empty: the day on which the run was scheduled.",
    )
    time_zone: Annotated[str, AfterValidator(_known_zone)] | None = Field(
        default=None,
        title="Time zone",
        description="Whose day the run date is, such as Europe/Berlin. Empty: that of the machine that runs the flow.",
    )
    model: str = Field(
        default=PRODUCTION_MODEL,
        title="Model",
        description="Hugging Face id, local folder, or smollm2-135m (the embedded one).",
    )
    id_column: str = Field(default="ticket_id", title="Id column", description="Unique and not null.")
    text_columns: tuple[str, ...] = Field(
        default=("subject", "body"),
        min_length=1,
        title="Text columns",
        description="Joined with a line break, nulls left out. Columns that a table lacks are allowed "
        "only for `subject`, as long as one other is there.",
    )
    head: str | None = Field(
        default=None,
        title="Fitted head",
        description="Folder made by flows.fit_labels. Empty: the model's own label scores.",
    )
    review_precision: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        title="Promised precision",
        description="Least share of right labels among tickets without needs_review. Takes a head.",
    )
    review_budget: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        title="Review budget",
        description="Share of the tickets that get needs_review, the least sure ones.",
    )
    execution: Literal["auto", "packed", "padded", "sequential"] = Field(
        default="auto", title="Execution", description="auto: packed where it is exact for the model, else padded."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", title="Number format", description="auto: the fastest here, found by a short probe."
    )
    threads: int | None = Field(
        default=None, ge=1, le=512, title="Threads", description="Processor threads of the model. Empty: probed."
    )
    batch_size: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        title="Batch size",
        description="Fixed rows a batch (32 is the published scheme). Empty: batches are planned for least cost.",
    )
    token_budget: int | None = Field(
        default=None, ge=1, title="Token budget", description="Most token positions in one forward pass. Empty: probed."
    )
    max_buckets: int = Field(
        default=256, ge=1, le=1000, title="Most buckets", description="Most mapped task runs of one flow run."
    )
    max_ticket_tokens: int = Field(
        default=1024, ge=1, title="Longest ticket", description="Longer tickets are cut and marked is_truncated."
    )
    truncate: Literal["end", "middle"] = Field(
        default="end", title="Cut from", description="Which part of a too long ticket is left out."
    )
    prefix_cache: bool = Field(
        default=True, title="Prefix cache", description="Compute the shared prompt prefix once and reuse it."
    )
    limit: int | None = Field(default=None, ge=1, title="Limit", description="Only the first rows of the table.")
    spot_check: int = Field(
        default=32, ge=0, title="Spot check", description="Tickets that are scored again one at a time."
    )
    min_agreement: float = Field(
        default=0.99, ge=0, le=1, title="Least agreement", description="Share of equal labels below which a run fails."
    )
    seed: int = Field(default=0, ge=0, title="Seed", description="Of the spot check's sample.")
    store: str | None = Field(
        default=None,
        title="Store of scored tickets",
        description="Folder kept between runs; tickets found there are not classified again. "
        "Empty: a hidden folder beside the output.",
    )
    store_days: int = Field(
        default=30, ge=1, title="Days kept", description="Stored scores that no run used for so long are deleted."
    )
    runner: Literal["threads", "dask", "ray"] = Field(
        default="threads", title="Runner", description="Where the mapped tasks run."
    )
    workers: int | None = Field(
        default=None, ge=1, le=256, title="Workers", description="Buckets classified at once. Empty: probed."
    )
    runner_address: str | None = Field(
        default=None, title="Runner address", description="Of a running Dask or Ray cluster. Empty: a local one."
    )
    tickets_contract: str = Field(
        default="data_contracts/tickets.json", title="Input contract", description="Suite for the incoming table."
    )
    predictions_contract: str = Field(
        default="data_contracts/predictions.json", title="Output contract", description="Suite for the predictions."
    )
    contract_parameters: dict[str, FiniteFloat] = Field(
        default_factory=dict,
        title="Contract overrides",
        description="Thresholds of the contracts by name, such as max_quarantine_rate or max_label_share.",
    )
    compare_with: str | None = Field(
        default=None,
        title="Compare with",
        description="Output folder of the earlier run that drift is measured against; with {run_date} in it the "
        "last day before this run that was published. Empty: the same as the output.",
    )
    on_drift: Literal["warn", "fail"] = Field(
        default="warn", title="On drift", description="What a shifted label distribution does to the run."
    )

    @model_validator(mode="after")
    def _check_review(self) -> Self:
        if self.review_precision is not None and self.review_budget is not None:
            raise ValueError("a promised precision and a review budget exclude each other: give one of them")
        if self.review_precision is not None and self.head is None:
            raise ValueError("a promised precision needs a fitted head: give one, or set a review budget instead")
        return self

    def resolved(self, day: date) -> Self:
        """The same settings with date templates filled in and a store named; ``compare_with`` stays a template.

        Args:
            day: The run date where the settings name none.

        Raises:
            SettingsError: The run date is no day, or a template names something other than run_date, year, month or day.
        """
        try:
            day = self.day() if self.run_date else day
        except ValueError:
            raise SettingsError(f"There is no day {self.run_date}. Give the run date as YYYY-MM-DD.") from None
        source, labels, output = (fill_dates(text, day) for text in (self.input, self.labels, self.output))
        compare_with = self.compare_with or self.output
        fill_dates(compare_with, day)
        return self.model_copy(
            update={
                "input": source,
                "labels": labels,
                "output": output,
                "store": self.store or str(Path(output).parent / ".ticket-store"),
                "run_date": day.isoformat(),
                "compare_with": compare_with,
            }
        )

    def zone(self) -> ZoneInfo | None:
        """The time zone of the run date; None is that of this machine."""
        return ZoneInfo(self.time_zone) if self.time_zone else None

    def day(self) -> date:
        """The run date of resolved settings."""
        return date.fromisoformat(self.run_date)


def fill_dates(template: str, day: date) -> str:
    """A path with ``{run_date}``, ``{year}``, ``{month}`` and ``{day}`` replaced.

    Raises:
        SettingsError: The template names something else.
    """
    words = {"run_date": day.isoformat(), "year": f"{day:%Y}", "month": f"{day:%m}", "day": f"{day:%d}"}
    try:
        return template.format_map(words)
    except (KeyError, ValueError, IndexError) as error:
        raise SettingsError(
            f"A path has a template that is not known ({error}). Allowed: {{run_date}}, {{year}}, {{month}}, {{day}}."
        ) from None
