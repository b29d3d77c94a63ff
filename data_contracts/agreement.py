"""The expectation about the spot check: the slow scorer agrees."""

from typing import ClassVar

from great_expectations.compatibility import pydantic
from great_expectations.render import LegacyRendererType
from great_expectations.render.renderer.renderer import renderer

from data_contracts.expectations import Number, RunExpectation, number_words, sentence

FEWEST_FOR_A_RATE = 8  # drawn tickets below which a share of near-ties says nothing


class ExpectSpotCheckToAgree(RunExpectation):
    """Agreement: expect the slow scorer to give sampled tickets the same label.

    Args:
        spot_check: Fields of `ticket_engine.spot_check.SpotCheck`.
        min_agreement: Least share of sampled tickets with an equal label; near-ties count as equal.
        min_bucket_agreement: The same within each bucket: a fault in one small bucket moves the whole share little.
        max_disagreement: Most allowed for the upper bound of the disagreement rate over all predictions.
        max_difference: Most by which a label's probability may differ where nothing is rounded to 16 bits.
        max_difference_16_bit: The same for runs in bfloat16 or float16.
        max_near_tie_rate: Most allowed for the share of near-ties among the tickets that were drawn.
    """

    spot_check: dict
    min_agreement: Number = pydantic.Field(default=None)
    min_bucket_agreement: Number = pydantic.Field(default=None)
    max_disagreement: Number = pydantic.Field(default=None)
    max_difference: Number = pydantic.Field(default=None)
    max_difference_16_bit: Number = pydantic.Field(default=None)
    max_near_tie_rate: Number = pydantic.Field(default=None)

    success_keys: ClassVar[tuple[str, ...]] = (
        "spot_check",
        "min_agreement",
        "min_bucket_agreement",
        "max_disagreement",
        "max_difference",
        "max_difference_16_bit",
        "max_near_tie_rate",
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
            "max_near_tie_rate": "no more than $max_near_tie_rate of the drawn ones may be too close to call",
            "max_difference": "probabilities may differ by $max_difference at most",
            "max_difference_16_bit": "by $max_difference_16_bit in a 16-bit format",
        }
        params = {name: number_words(kwargs[name], True) for name in parts if kwargs.get(name) is not None}
        template = "The slow scorer must give the same label to " + ", and ".join(parts[name] for name in params)
        return sentence(template + ".", params, configuration, runtime_configuration)

    def judge(self) -> tuple[bool, str, dict]:
        check = self.spot_check
        if not check["sampled"]:
            return True, "no ticket was scored again", {}

        def percent(name: str) -> str:
            return number_words(check[name], True)

        words = (
            f"{check['agreed']} of {check['sampled']} tickets got the same label, {check['near_ties']} were near-ties, "
            f"{check['disagreed']} differ (agreement {percent('agreement')}, {percent('worst_bucket_agreement')} in the "
            f"worst bucket); with {percent('confidence')} confidence at most {percent('upper_bound')} of all differ; "
            f"probabilities differ by up to {percent('largest_difference')}"
        )
        broken = self._broken()
        if broken:
            words += f"; broken: {', '.join(broken)}"
        return not broken, words, {"ids": list(check["disagreeing_ids"])}

    def _broken(self) -> list[str]:
        """Names of the limits that do not hold."""
        check = self.spot_check
        rounded = self.max_difference_16_bit if check.get("is_16_bit") else self.max_difference
        limits = [
            ("min_agreement", self.min_agreement, check["agreement"], -1),
            ("min_bucket_agreement", self.min_bucket_agreement, check["worst_bucket_agreement"], -1),
            ("max_disagreement", self.max_disagreement, check["upper_bound"], 1),
            ("max_difference", rounded, check["largest_difference"], 1),
            (
                "max_difference of tickets decided by their text",
                self.max_difference,
                check.get("largest_text_difference"),
                1,
            ),
            ("max_difference from float32", self.max_difference_16_bit, check["float32_largest_difference"], 1),
        ]
        if check["drawn"] >= FEWEST_FOR_A_RATE:
            limits.append(("max_near_tie_rate", self.max_near_tie_rate, check.get("near_tie_rate"), 1))
        return [
            name
            for name, limit, found, sign in limits
            if limit is not None and found is not None and sign * found > sign * limit
        ]
