"""The page of one contract: Great Expectations' Data Docs in a frame of our own that needs no network.

The stock templates fetch Bootstrap, jQuery, fonts and a logo from the network, and without them show empty
tables. Here the same renderers fill `templates/page.j2`: one file, style inside, no script.
"""

import html
from pathlib import Path
from typing import Any

from great_expectations.core.expectation_validation_result import ExpectationSuiteValidationResult
from great_expectations.render.renderer import ValidationResultsPageRenderer
from great_expectations.render.view import DefaultJinjaPageView
from jinja2 import ChoiceLoader, FileSystemLoader, pass_context

from data_contracts.reports import ContractReport

TEMPLATES = Path(__file__).parent / "templates"


class SelfContainedPageView(DefaultJinjaPageView):
    """Great Expectations' view with our templates before its own, and plain strings escaped.

    The stock view writes strings of table cells as they are; labels and ids come from outside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.env.loader = ChoiceLoader([FileSystemLoader(TEMPLATES), self.env.loader])

    @pass_context
    def render_content_block(self, jinja_context: Any, content_block: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(content_block, str):
            return html.escape(content_block)
        if isinstance(content_block, list):
            content_block = [html.escape(item) if isinstance(item, str) else item for item in content_block]
        return super().render_content_block(jinja_context, content_block, *args, **kwargs)


def write_page(result: ExpectationSuiteValidationResult, report: ContractReport, path: Path, heading: str) -> None:
    """Write the Data Docs page of one validation result."""
    document = ValidationResultsPageRenderer(run_info_at_end=False).render(result)
    verdict_class = "failed" if not report.passed else "warning" if report.warnings else "passed"
    text = SelfContainedPageView().render(
        document,
        heading=html.escape(heading),
        verdict=html.escape(verdict(report)),
        verdict_class=verdict_class,
        suite_name=html.escape(report.stage),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def verdict(report: ContractReport) -> str:
    """The outcome of a contract in one sentence for people."""
    held = sum(item.passed for item in report.expectations)
    total = len(report.expectations)
    if report.failed:
        names = ", ".join(item.name for item in report.failed)
        return f"Does not hold, nothing is published: {held} of {total} expectations hold. Failed: {names}."
    if report.warnings:
        names = ", ".join(item.name for item in report.warnings)
        return f"Holds, with warnings: {held} of {total} expectations hold. To look at: {names}."
    return f"Holds: all {total} expectations hold."
