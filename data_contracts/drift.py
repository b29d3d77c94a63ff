"""The expectation about the label shares: they stay close to those of the last published run."""

from typing import ClassVar

from great_expectations.compatibility import pydantic
from great_expectations.render import (
    LegacyDiagnosticRendererType,
    LegacyRendererType,
    RenderedStringTemplateContent,
    RenderedTableContent,
)
from great_expectations.render.renderer.renderer import renderer

from data_contracts.expectations import NOTHING_TO_MEASURE, Number, RunExpectation, number_words, sentence


class ExpectLabelSharesToStayClose(RunExpectation):
    """Drift: expect the shares of the labels to stay close to those of the last published run.

    The distance is the total variation: half the sum of the absolute differences of the shares, which is the
    share of tickets that would need another label for both distributions to be equal.

    Args:
        counts: Predictions a label.
        counts_before: Those of the last published run, or None if there is none.
        compared_with: Run date of that run.
        max_drift: Most allowed distance, 0 to 1.
        min_rows: With fewer predictions on either side the distance is not judged.
    """

    counts: dict
    counts_before: dict | None = None
    compared_with: str | dict | None = None  # a dict until the parameter is filled in
    max_drift: Number = pydantic.Field(default=None)
    min_rows: Number = pydantic.Field(default=None)

    success_keys: ClassVar[tuple[str, ...]] = (
        "counts",
        "counts_before",
        "compared_with",
        "max_drift",
        "min_rows",
    )
    args_keys: ClassVar[tuple[str, ...]] = success_keys

    @classmethod
    @renderer(renderer_type=LegacyRendererType.PRESCRIPTIVE)
    def _prescriptive_renderer(cls, configuration=None, result=None, runtime_configuration=None, **_):
        configuration = configuration or result.expectation_config
        kwargs = configuration.kwargs
        template = "The shares of the labels may move by at most $max_drift since the last published run."
        params = {"max_drift": number_words(kwargs["max_drift"], True)}
        if kwargs.get("min_rows"):
            template += " Judged from $min_rows predictions on."
            params["min_rows"] = number_words(kwargs["min_rows"], False)
        return sentence(template, params, configuration, runtime_configuration)

    @classmethod
    @renderer(renderer_type=LegacyDiagnosticRendererType.OBSERVED_VALUE)
    def _diagnostic_observed_value_renderer(cls, configuration=None, result=None, runtime_configuration=None, **_):
        shares = (result.result.get("details") or {}).get("shares")
        found = result.result.get("observed_value", "--")
        if not shares:
            return found
        return RenderedTableContent(
            content_block_type="table",
            header_row=["Label", "Earlier run", "This run"],
            table=[[label, number_words(before, True), number_words(now, True)] for label, before, now in shares],
            subheader=RenderedStringTemplateContent(string_template={"template": found, "tag": "p"}),
            styling={"body": {"classes": ["table", "table-sm"]}},
        )

    def judge(self) -> tuple[bool, str, dict]:
        total = sum(self.counts.values())
        total_before = sum((self.counts_before or {}).values())
        if not total or not total_before:
            return True, f"{NOTHING_TO_MEASURE}: no predictions, or no earlier run", {}
        labels = list(dict.fromkeys([*self.counts_before, *self.counts]))
        shares = [
            [label, self.counts_before.get(label, 0) / total_before, self.counts.get(label, 0) / total]
            for label in labels
        ]
        drift = sum(abs(now - before) for _, before, now in shares) / 2
        details = {"value": drift, "shares": sorted(shares, key=lambda row: -abs(row[2] - row[1]))}
        if min(total, total_before) < (self.min_rows or 0):
            return True, f"{number_words(drift, True)}, not judged: {total} predictions, {total_before} before", details
        return (
            self.max_drift is None or drift <= self.max_drift,
            f"The shares moved by {number_words(drift, True)}"
            + (f" since the run of {self.compared_with}" if self.compared_with else ""),
            details,
        )
