"""Expectations of our own, shown in Data Docs like the built-in ones; `agreement` and `drift` hold two more.

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
)
from great_expectations.render.renderer.renderer import renderer

NOTHING_TO_MEASURE = "nothing to measure"
ONLY_WARNS = " A breach only warns."
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
        configuration = configuration or result.expectation_config
        return sentence(
            "Every input row must have exactly one outcome: a prediction, or a quarantine row with a reason.",
            {},
            configuration,
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
        configuration = configuration or result.expectation_config
        params = _given(configuration, "min_value", "max_value")
        return sentence(
            "Each ticket's scores must be finite numbers, and its probabilities over the label set must sum to 1 "
            "($min_value to $max_value).",
            params,
            configuration,
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
        configuration = configuration or result.expectation_config
        kwargs = configuration.kwargs
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
        return sentence(template, params, configuration, runtime_configuration)

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
        configuration = configuration or result.expectation_config
        required = configuration.kwargs["required"]
        words = "; ".join(f"{name} ({' or '.join(_type_words(types))})" for name, types in required.items())
        return sentence(
            "The input table must have these columns: $columns.",
            {"columns": words},
            configuration,
            runtime_configuration,
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


def number_words(value: Any, percent: bool) -> str:
    """A number as people write it: 12.5 %, 1,186 or 0.25."""
    if not isinstance(value, int | float):
        return str(value)
    if percent:
        text = f"{100 * value:.2f}"
        if text in ("0.00", "100.00"):  # nearly none or nearly all must not read as none or all
            text = f"{100 * value:.6f}"
        return f"{text.rstrip('0').rstrip('.')} %"
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


def sentence(
    template: str, params: dict, configuration: Any, runtime: dict | None
) -> list[RenderedStringTemplateContent]:
    """A row's text in Data Docs, the parameters set apart; says so where a breach stops nothing."""
    if getattr(configuration.severity, "value", configuration.severity) != "critical":
        template += ONLY_WARNS
    content = {"template": template, "params": params, "styling": (runtime or {}).get("styling")}
    return [RenderedStringTemplateContent(content_block_type="string_template", string_template=content)]
