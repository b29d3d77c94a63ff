"""Expectations of our own, shown in Data Docs like the built-in ones."""

from typing import Any, ClassVar

from great_expectations.compatibility import pydantic
from great_expectations.core.suite_parameters import SuiteParameterDict
from great_expectations.expectations.core import ExpectColumnValuesToBeBetween, ExpectColumnValuesToBeInSet
from great_expectations.expectations.expectation import BatchExpectation, render_suite_parameter_string
from great_expectations.render import LegacyRendererType, RenderedStringTemplateContent
from great_expectations.render.renderer.renderer import renderer

Number = float | SuiteParameterDict | None


def _sentence(template: str, params: dict[str, Any], runtime: dict | None) -> list[RenderedStringTemplateContent]:
    styling = (runtime or {}).get("styling")
    content = {"template": template, "params": params, "styling": styling}
    return [RenderedStringTemplateContent(content_block_type="string_template", string_template=content)]


class ExpectRunFigureToBeBetween(BatchExpectation):
    """Expect a figure of the whole run, such as the agreement of the spot check, to stay within limits.

    Args:
        figure: What is measured, in words; the row's text in Data Docs.
        observed: The measured value, as a rule a `$PARAMETER`. None means that there was nothing to
            measure, and holds.
        min_value: Least allowed, or None.
        max_value: Most allowed, or None.
    """

    figure: str
    observed: Number = pydantic.Field(default=None)
    min_value: Number = pydantic.Field(default=None)
    max_value: Number = pydantic.Field(default=None)

    metric_dependencies: ClassVar[tuple[str, ...]] = ("table.row_count",)
    domain_keys: ClassVar[tuple[str, ...]] = ()
    success_keys: ClassVar[tuple[str, ...]] = ("figure", "observed", "min_value", "max_value")
    args_keys: ClassVar[tuple[str, ...]] = ("figure", "observed", "min_value", "max_value")

    @classmethod
    @renderer(renderer_type=LegacyRendererType.PRESCRIPTIVE)
    @render_suite_parameter_string
    def _prescriptive_renderer(cls, configuration=None, result=None, runtime_configuration=None):
        kwargs = (configuration or result.expectation_config).kwargs
        limits = [
            words
            for name, words in (("min_value", "at least $min_value"), ("max_value", "at most $max_value"))
            if kwargs.get(name) is not None
        ]
        template = f"$figure must be {' and '.join(limits)}." if limits else "$figure is reported."
        params = {name: kwargs[name] for name in ("figure", "min_value", "max_value") if kwargs.get(name) is not None}
        return _sentence(template, params, runtime_configuration)

    def _validate(self, metrics, runtime_configuration=None, execution_engine=None) -> dict:
        kwargs = self._get_success_kwargs()
        value, low, high = kwargs.get("observed"), kwargs.get("min_value"), kwargs.get("max_value")
        success = value is None or ((low is None or value >= low) and (high is None or value <= high))
        return {"success": success, "result": {"observed_value": "nothing to measure" if value is None else value}}


class ExpectEveryInputRowToHaveOneOutcome(ExpectColumnValuesToBeInSet):
    """Coverage: expect each input row to be in predictions or in quarantine, exactly once."""

    @classmethod
    @renderer(renderer_type=LegacyRendererType.PRESCRIPTIVE)
    @render_suite_parameter_string
    def _prescriptive_renderer(cls, configuration=None, result=None, runtime_configuration=None):
        return _sentence(
            "Every input row must have exactly one outcome: a prediction, or a quarantine row with a reason.",
            {},
            runtime_configuration,
        )


class ExpectProbabilitiesToSumToOne(ExpectColumnValuesToBeBetween):
    """Expect the probabilities of a ticket over the label set to be finite and to sum to 1."""

    @classmethod
    @renderer(renderer_type=LegacyRendererType.PRESCRIPTIVE)
    @render_suite_parameter_string
    def _prescriptive_renderer(cls, configuration=None, result=None, runtime_configuration=None):
        return _sentence(
            "Each ticket's probabilities over the label set must be finite and sum to 1.", {}, runtime_configuration
        )
