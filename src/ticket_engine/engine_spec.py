"""What decides a run's scores, and how the machine is used: one small file that every stage reads."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from ticket_engine.label_trie import build_trie
from ticket_engine.prompts import Prompt

SPEC_FILE = "engine.json"
TOKENIZER_FILE = "tokenizer.json"
SCORE_VERSION = 3  # raise when scores change for the same model, prompt and ticket
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25, "float16": 0.05}
STATE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.08, "float16": 0.02}  # of hidden states, as a share of their length


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything that decides a score, and how the machine is used. Small; kept as ``engine.json``.

    Attributes:
        model: As the user named it.
        model_folder: Where its files are.
        model_hash: SHA-256 over its files.
        labels: Class ids in order.
        labels_hash: SHA-256 over names, descriptions and instruction.
        prompt: Token ids of everything but the tickets.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        threads: Processor threads of one pass.
        workers: Passes at once.
        execution: ``packed``, ``padded`` or ``sequential``.
        execution_reason: Why it is not packed, where the model is the reason.
        prefix_cache: Whether the prompt prefix is computed once and shared.
        max_ticket_tokens: Longest ticket; longer ones are cut.
        truncate: ``end`` or ``middle``.
        token_budget: Most token positions of a pass.
        head: Folder of the fitted head that decides, None for the model's own label scores.
        head_hash: SHA-256 of that head.
        probe: What the probe measured, for the manifest.
        libraries: Versions of the libraries whose arithmetic the scores are.
    """

    model: str
    model_folder: str
    model_hash: str
    labels: tuple[str, ...]
    labels_hash: str
    prompt: Prompt
    dtype: str
    threads: int
    workers: int
    execution: str
    execution_reason: str
    prefix_cache: bool
    max_ticket_tokens: int
    truncate: str
    token_budget: int
    head: str | None
    head_hash: str | None
    probe: dict
    libraries: dict[str, str]

    @property
    def score_key(self) -> str:
        """Hash of all that a ticket's scores depend on besides its token ids, hexadecimal."""
        parts = [SCORE_VERSION, self.model_hash, self.prompt.content_hash, list(self.labels), self.dtype]
        parts += [self.execution, self.prefix_cache, self.head_hash, sorted(self.libraries.items())]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def extra_tokens(self) -> int:
        """Positions of a pass that every ticket has besides its own tokens."""
        front = 0 if self.prefix_cache else len(self.prompt.prefix_ids)
        nodes = 0 if self.head else build_trie(self.prompt.label_ids).nodes
        return front + len(self.prompt.ending_ids) + nodes

    @property
    def tolerance(self) -> float:
        """Most by which rounding may move the log-probability of a likely label, natural log.

        In float32 it holds for every label. In 16-bit formats it holds for labels of probability 0.25 and
        more, which are those that can be chosen; unlikely labels move further (measured on 24 real tickets
        in bfloat16: by up to 0.70), though hardly in probability.
        """
        return TOLERANCE[self.dtype]


def read_spec(folder: Path) -> EngineSpec:
    """The spec that `preparation.prepare_engine` wrote."""
    fields = json.loads((folder / SPEC_FILE).read_text(encoding="utf-8"))
    prompt = {key: _tuples(value) for key, value in fields.pop("prompt").items()}
    return EngineSpec(**fields | {"prompt": Prompt(**prompt), "labels": tuple(fields["labels"])})


def _tuples(value: object) -> object:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
