"""The expectation about the spot check: the slow scorer agrees."""

from typing import ClassVar

from great_expectations.compatibility import pydantic
from great_expectations.render import LegacyRendererType
from great_expectations.render.renderer.renderer import renderer

from data_contracts.expectations import Number, RunExpectation, number_words, sentence


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
        configuration = configuration or result.expectation_config
        kwargs = configuration.kwargs
        parts = {
            "min_agreement": "at least $min_agreement of the sampled tickets",
            "min_bucket_agreement": "at least $min_bucket_agreement of those of every bucket",
            "max_disagreement": "no more than $max_disagreement of all predictions may differ, proven by the sample",
        }
        params = {name: number_words(kwargs[name], True) for name in parts if kwargs.get(name) is not None}
        if kwargs.get("max_disagreement") == 1:
            params.pop("max_disagreement")  # a bound of 100 % is no limit
        template = "The slow scorer must give the same label to " + ", and ".join(parts[name] for name in params)
        return sentence(template + ".", params, configuration, runtime_configuration)

    def judge(self) -> tuple[bool, str, dict]:
        check = self.spot_check
        if not check["sampled"]:
            return True, "no ticket was scored again", {}
        holds = (
            (self.min_agreement is None or check["agreement"] >= self.min_agreement)
            and (self.min_bucket_agreement is None or check["worst_bucket_agreement"] >= self.min_bucket_agreement)
            and (self.max_disagreement is None or check["upper_bound"] <= self.max_disagreement)
        )

        def percent(name: str) -> str:
            return number_words(check[name], True)

        words = (
            f"{check['agreed']} of {check['sampled']} tickets got the same label, {check['near_ties']} were near-ties, "
            f"{check['disagreed']} differ (agreement {percent('agreement')}, {percent('worst_bucket_agreement')} in the "
            f"worst bucket); with {percent('confidence')} confidence at most {percent('upper_bound')} of all differ"
        )
        return holds, words, {"ids": list(check["disagreeing_ids"])}
