"""What a contract found, in plain values: nothing of Great Expectations leaves this package."""

from dataclasses import asdict, dataclass

DOCS_FOLDER = "data_docs"


@dataclass(frozen=True, slots=True)
class ExpectationResult:
    """One expectation: its name, what it found, and up to 20 ids of rows that break it."""

    name: str
    passed: bool
    severity: str
    observed: str
    unexpected: int
    example_ids: tuple


@dataclass(frozen=True, slots=True)
class ContractReport:
    """All expectations of one contract. Failed warnings do not fail the contract."""

    stage: str
    expectations: tuple[ExpectationResult, ...]

    @property
    def failed(self) -> tuple[ExpectationResult, ...]:
        """Expectations whose failure stops the run."""
        return tuple(item for item in self.expectations if not item.passed and item.severity != "warning")

    @property
    def warnings(self) -> tuple[ExpectationResult, ...]:
        """Expectations that failed but only warn."""
        return tuple(item for item in self.expectations if not item.passed and item.severity == "warning")

    @property
    def passed(self) -> bool:
        """Whether the run may go on."""
        return not self.failed

    def one_line(self) -> str:
        """The verdict with the first failures, without ticket text."""
        if self.passed:
            more = f", warnings: {', '.join(item.name for item in self.warnings)}" if self.warnings else ""
            return f"all {len(self.expectations)} expectations hold{more}"
        parts = []
        for item in self.failed[:3]:
            ids = f", such as {', '.join(map(str, item.example_ids[:3]))}" if item.example_ids else ""
            parts.append(f"{item.name} found {item.observed}{ids}")
        return f"{len(self.failed)} of {len(self.expectations)} expectations fail: {'; '.join(parts)}"

    def summary(self) -> dict:
        """For the manifest."""
        return {"passed": self.passed, "expectations": [asdict(item) for item in self.expectations]}
