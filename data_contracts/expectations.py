"""Expectations of our own, shown in Data Docs like the built-in ones.

Two read columns of the contract's table. The others judge figures of the whole run, which come in as
``$PARAMETER`` values: Great Expectations sees one table, and an agreement or a drift is not in it.
"""

from typing import Any, ClassVar

from great_expectations.compatibility import pydantic
from great_expectations.expectations.core import ExpectColumnValuesToBeBetween, ExpectColumnValuesToBeInSet
from great_expectations.expectations.expectation import BatchExpectation
from great_expectations.render import (
    LegacyDiagnosticRendererType,
    LegacyRendererType,
    RenderedStringTemplateContent,
    RenderedTableContent,
)
from great_expectations.render.renderer.renderer import renderer

NOTHING_TO_MEASURE = "nothing to measure"
Number = float | dict | None  # a dict is {"$PARAMETER": name} until the run fills it in


class ExpectEveryInputRowToHaveOneOutcome(ExpectColumnValuesToBeInSet):
    """Coverage: expect each input row to be in predictions or in quarantine, exactly once.

    Args:
        column: What became of each row, see `tables.outcome_table`.
        value_set: The outcomes that are right.
    """

    @classmethod
    @renderer(renderer_type=LegacyRendererType.PRESCRIPTIVE)
    def _prescriptive_renderer(cls, configuration=None, result=None, runtime_configuration=None, **_):
        return _sentence(
            "Every input row must have exactly one outcome: a prediction, or a quarantine row with a reason.",
            {},
            runtime_configuration,
        )

    @classmethod
    @renderer(renderer_type=LegacyDiagnosticRendererType.OBSERVED_VALUE)
    def _diagnostic_observed_value_renderer(cls, configuration=None, result=None, runtime_configuration=None, **_):
        return _of_rows(result, "have one outcome")


class ExpectLogProbsToSumToOne(ExpectColumnValuesToBeBetween):
    """Expect the scores of each ticket to be finite, and their exponentials to sum to 1.

    Args:
        column: Sum of the exponentials of a ticket's log-probabilities; -1 where one is not finite.
        min_value: Least allowed sum.
        max_value: Most allowed sum.
    """

    @classmethod
    @renderer(renderer_type=LegacyRendererType.PRESCRIPTIVE)
    def _prescriptive_renderer(cls, configuration=None, result=None, runtime_configuration=None, **_):
        params = _given(configuration or result.expectation_config, "min_value", "max_value")
        return _sentence(
            "Each ticket's scores must be finite numbers, and its probabilities over the label set must sum to 1 "
            "($min_value to $max_value).",
            params,
            runtime_configuration,
        )

    @classmethod
    @renderer(renderer_type=LegacyDiagnosticRendererType.OBSERVED_VALUE)
    def _diagnostic_observed_value_renderer(cls, configuration=None, result=None, runtime_configuration=None, **_):
        return _of_rows(result, "do")


class RunExpectation(BatchExpectation):
    """An expectation about the whole run. Children say what they found in `judge`."""

    metric_dependencies: ClassVar[tuple[str, ...]] = ("table.row_count",)
    domain_keys: ClassVar[tuple[str, ...]] = ()

    def judge(self) -> tuple[bool, str, dict]:
        """Whether it holds, what was found in words, and details in JSON types."""
        raise NotImplementedError

    def _validate(self, metrics, runtime_configuration=None, execution_engine=None) -> dict:
        success, observed, details = self.judge()
        return {"success": success, "result": {"observed_value": observed, "details": details}}


class ExpectRunFigureToBeBetween(RunExpectation):
    """Expect a figure of the run, such as the share of rows in quarantine, to stay within limits.

    Args:
        figure: What is measured, in words.
        observed: The value, as a rule a ``$PARAMETER``. None: there was nothing to measure, and it holds.
        min_value: Least allowed, or None.
        max_value: Most allowed, or None.
        percent: Whether figure and limits are shown as per cent.
        rows: Rows that the figure was made from.
        min_rows: With fewer rows the figure is not judged: a share of a handful says little.
    """

    figure: str
    observed: Number = pydantic.Field(default=None)
    min_value: Number = pydantic.Field(default=None)
    max_value: Number = pydantic.Field(default=None)
    percent: bool = False
    rows: Number = pydantic.Field(default=None)
    min_rows: Number = pydantic.Field(default=None)

    success_keys: ClassVar[tuple[str, ...]] = (
        "figure",
        "observed",
        "min_value",
        "max_value",
        "percent",
        "rows",
        "min_rows",
    )
    args_keys: ClassVar[tuple[str, ...]] = success_keys

    @classmethod
    @renderer(renderer_type=LegacyRendererType.PRESCRIPTIVE)
    def _prescriptive_renderer(cls, configuration=None, result=None, runtime_configuration=None, **_):
        kwargs = (configuration or result.expectation_config).kwargs
        params = {"figure": kwargs["figure"]}
        limits = []
        for name, words in (("min_value", "at least"), ("max_value", "at most")):
            if kwargs.get(name) is not None:
                limits.append(f"{words} ${name}")
                params[name] = number_words(kwargs[name], kwargs.get("percent", False))
        template = f"$figure must be {' and '.join(limits)}." if limits else "$figure is reported."
        if kwargs.get("min_rows"):
            template += " Judged from $min_rows rows on."
            params["min_rows"] = number_words(kwargs["min_rows"], False)
        return _sentence(template, params, runtime_configuration)

    def judge(self) -> tuple[bool, str, dict]:
        if self.observed is None:
            return True, NOTHING_TO_MEASURE, {}
        found = number_words(self.observed, self.percent)
        if self.min_rows is not None and self.rows is not None and self.rows < self.min_rows:
            return True, f"{found}, not judged: {number_words(self.rows, False)} rows", {"value": self.observed}
        low = self.min_value is None or self.observed >= self.min_value
        high = self.max_value is None or self.observed <= self.max_value
        return low and high, found, {"value": self.observed}


class ExpectInputColumnsToHaveTypes(RunExpectation):
    """Expect the input table to have columns of certain types.

    Args:
        found: Type of each column of the input, by name.
        required: Allowed types of each column that must be there, by name. Types are named as Polars does, with
            or without what stands in brackets.
    """

    found: dict
    required: dict

    success_keys: ClassVar[tuple[str, ...]] = ("found", "required")
    args_keys: ClassVar[tuple[str, ...]] = success_keys

    @classmethod
    @renderer(renderer_type=LegacyRendererType.PRESCRIPTIVE)
    def _prescriptive_renderer(cls, configuration=None, result=None, runtime_configuration=None, **_):
        required = (configuration or result.expectation_config).kwargs["required"]
        words = "; ".join(f"{name} ({' or '.join(_type_words(types))})" for name, types in required.items())
        return _sentence(
            "The input table must have these columns: $columns.", {"columns": words}, runtime_configuration
        )

    def judge(self) -> tuple[bool, str, dict]:
        wrong = []
        for name, types in self.required.items():
            found = self.found.get(name)
            if found is None:
                wrong.append(f"{name} is missing")
            elif found not in types and found.split("(")[0] not in types:
                wrong.append(f"{name} is {found}")
        words = "; ".join(wrong) or "; ".join(f"{name}: {self.found[name]}" for name in self.required)
        return not wrong, words or "no column is required", {}


class ExpectSpotCheckToAgree(RunExpectation):
    """Agreement: expect the slow scorer to give sampled tickets the same label.

    Args:
        spot_check: Fields of `ticket_engine.spot_check.SpotCheck`.
        min_agreement: Least share of sampled tickets with an equal label; near-ties count as equal.
        min_bucket_agreement: The same within each bucket: a fault in one small bucket moves the whole share little.
        max_disagreement: Most allowed for the upper bound of the disagreement rate over all predictions.
    """

    spot_check: dict
    min_agreement: Number = pydantic.Field(default=None)
    min_bucket_agreement: Number = pydantic.Field(default=None)
    max_disagreement: Number = pydantic.Field(default=None)

    success_keys: ClassVar[tuple[str, ...]] = (
        "spot_check",
        "min_agreement",
        "min_bucket_agreement",
        "max_disagreement",
    )
    args_keys: ClassVar[tuple[str, ...]] = success_keys

    @classmethod
    @renderer(renderer_type=LegacyRendererType.PRESCRIPTIVE)
    def _prescriptive_renderer(cls, configuration=None, result=None, runtime_configuration=None, **_):
        kwargs = (configuration or result.expectation_config).kwargs
        parts = {
            "min_agreement": "at least $min_agreement of the sampled tickets",
            "min_bucket_agreement": "at least $min_bucket_agreement of those of every bucket",
            "max_disagreement": "no more than $max_disagreement of all predictions may differ, proven by the sample",
        }
        params = {name: number_words(kwargs[name], True) for name in parts if kwargs.get(name) is not None}
        if kwargs.get("max_disagreement") == 1:
            params.pop("max_disagreement")  # a bound of 100 % is no limit
        template = "The slow scorer must give the same label to " + ", and ".join(parts[name] for name in params)
        return _sentence(template + ".", params, runtime_configuration)

    def judge(self) -> tuple[bool, str, dict]:
        check = self.spot_check
        if not check["sampled"]:
            return True, "no ticket was scored again", {}
        holds = (
            (self.min_agreement is None or check["agreement"] >= self.min_agreement)
            and (self.min_bucket_agreement is None or check["worst_bucket_agreement"] >= self.min_bucket_agreement)
            and (self.max_disagreement is None or check["upper_bound"] <= self.max_disagreement)
        )
        words = (
            f"{check['agreed']} of {check['sampled']} tickets got the same label, {check['near_ties']} were near-ties, "
            f"{check['disagreed']} differ ({check['agreement']:.1%} agreement, {check['worst_bucket_agreement']:.1%} in "
            f"the worst bucket); with {check['confidence']:.0%} confidence at most {check['upper_bound']:.1%} of all differ"
        )
        return holds, words, {"ids": list(check["disagreeing_ids"])}


class ExpectLabelSharesToStayClose(RunExpectation):
    """Drift: expect the shares of the labels to stay close to those of the last published run.

    The distance is the total variation: half the sum of the absolute differences of the shares, which is the
    share of tickets that would need another label for both distributions to be equal.

    Args:
        counts: Predictions a label.
        counts_before: Those of the last published run, or None if there is none.
        max_drift: Most allowed distance, 0 to 1.
        min_rows: With fewer predictions on either side the distance is not judged.
    """

    counts: dict
    counts_before: dict | None = None
    max_drift: Number = pydantic.Field(default=None)
    min_rows: Number = pydantic.Field(default=None)

    success_keys: ClassVar[tuple[str, ...]] = ("counts", "counts_before", "max_drift", "min_rows")
    args_keys: ClassVar[tuple[str, ...]] = success_keys

    @classmethod
    @renderer(renderer_type=LegacyRendererType.PRESCRIPTIVE)
    def _prescriptive_renderer(cls, configuration=None, result=None, runtime_configuration=None, **_):
        kwargs = (configuration or result.expectation_config).kwargs
        template = "The shares of the labels may move by at most $max_drift since the last published run."
        params = {"max_drift": number_words(kwargs["max_drift"], True)}
        if kwargs.get("min_rows"):
            template += " Judged from $min_rows predictions on."
            params["min_rows"] = number_words(kwargs["min_rows"], False)
        return _sentence(template, params, runtime_configuration)

    @classmethod
    @renderer(renderer_type=LegacyDiagnosticRendererType.OBSERVED_VALUE)
    def _diagnostic_observed_value_renderer(cls, configuration=None, result=None, runtime_configuration=None, **_):
        shares = (result.result.get("details") or {}).get("shares")
        found = result.result.get("observed_value", "--")
        if not shares:
            return found
        return RenderedTableContent(
            content_block_type="table",
            header_row=["Label", "Last run", "This run"],
            table=[[label, f"{before:.1%}", f"{now:.1%}"] for label, before, now in shares],
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
            return True, f"{drift:.1%}, not judged: {total} predictions, {total_before} before", details
        return self.max_drift is None or drift <= self.max_drift, f"The shares moved by {drift:.1%}", details


def number_words(value: Any, percent: bool) -> str:
    """A number as people write it: 12.5 %, 1,186 or 0.25."""
    if not isinstance(value, int | float):
        return str(value)
    if percent:
        return f"{100 * value:.4g} %"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


def _type_words(types: list[str]) -> list[str]:
    """The types with all whole numbers in one word, if most of them are there."""
    whole = [name for name in types if name.lstrip("U").startswith("Int")]
    return [*[name for name in types if name not in whole], "whole number"] if len(whole) > 3 else types


def _given(configuration: Any, *names: str) -> dict:
    return {name: configuration.kwargs.get(name) for name in names}


def _of_rows(result: Any, words: str) -> str:
    rows, wrong = result.result.get("element_count"), result.result.get("unexpected_count")
    return "--" if rows is None or wrong is None else f"{rows - wrong:,} of {rows:,} {words}"


def _sentence(template: str, params: dict, runtime: dict | None) -> list[RenderedStringTemplateContent]:
    content = {"template": template, "params": params, "styling": (runtime or {}).get("styling")}
    return [RenderedStringTemplateContent(content_block_type="string_template", string_template=content)]
