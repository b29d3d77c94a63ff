"""What a contract found, in plain values: nothing of Great Expectations leaves this package."""

from dataclasses import asdict, dataclass, field

DOCS_FOLDER = "data_docs"
CRITICAL, WARNING = "critical", "warning"


@dataclass(frozen=True, slots=True)
class ExpectationResult:
    """One expectation of a contract and what it found.

    Attributes:
        name: Its title in the suite.
        kind: Its type, as in the suite.
        passed: Whether it holds.
        severity: ``critical`` stops the run; ``warning`` and ``info`` only tell.
        expected: What is expected, a sentence.
        observed: What was found, in words and numbers.
        unexpected: Rows that break it; 0 if it is about the whole run.
        example_ids: Up to 20 ids of such rows.
    """

    name: str
    kind: str
    passed: bool
    severity: str
    expected: str
    observed: str
    unexpected: int
    example_ids: tuple

    @property
    def verdict(self) -> str:
        """``passed``, ``failed``, or ``warning`` where a failure stops nothing."""
        if self.passed:
            return "passed"
        return "failed" if self.severity == CRITICAL else WARNING


@dataclass(frozen=True, slots=True)
class ContractReport:
    """All expectations of one contract over one run.

    Attributes:
        stage: Name of the suite: ``tickets`` or ``predictions``.
        expectations: In the order of the suite.
        parameters: The thresholds and figures that filled its ``$PARAMETER`` values.
        suite: The suite as it ran, with defaults and overrides filled in as ``parameters``.
        page: Its page, relative to the run's folder; empty if none was written.
        broken_rows: Places of the table's rows that break an expectation which stops the run, with its name.
    """

    stage: str
    expectations: tuple[ExpectationResult, ...]
    parameters: dict = field(default_factory=dict)
    suite: dict = field(default_factory=dict)
    page: str = ""
    broken_rows: dict[int, str] = field(default_factory=dict)

    @property
    def failed(self) -> tuple[ExpectationResult, ...]:
        """Expectations whose failure stops the run."""
        return tuple(item for item in self.expectations if item.verdict == "failed")

    @property
    def warnings(self) -> tuple[ExpectationResult, ...]:
        """Expectations that do not hold but only warn."""
        return tuple(item for item in self.expectations if item.verdict == WARNING)

    @property
    def passed(self) -> bool:
        """Whether the run may go on."""
        return not self.failed

    def one_line(self) -> str:
        """The verdict with the first failures, without ticket text."""
        if not self.warnings and self.passed:
            return f"all {len(self.expectations)} expectations hold"
        if self.passed:
            held = sum(item.passed for item in self.expectations)
            names = ", ".join(item.name for item in self.warnings)
            return f"{held} of {len(self.expectations)} expectations hold, warnings: {names}"
        parts = []
        for item in self.failed[:3]:
            ids = f", such as {', '.join(map(str, item.example_ids[:3]))}" if item.example_ids else ""
            parts.append(f"{item.name} found {item.observed}{ids}")
        return f"{len(self.failed)} of {len(self.expectations)} expectations fail: {'; '.join(parts)}"

    def summary(self) -> dict:
        """For the manifest, in types that JSON keeps."""
        return {
            "passed": self.passed,
            "expectations": [asdict(item) | {"example_ids": list(item.example_ids)} for item in self.expectations],
            "parameters": self.parameters,
            "suite": self.suite,
            "page": self.page,
        }
