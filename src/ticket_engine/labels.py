"""The label set: read from YAML, checked, hashed."""

import hashlib
import json
import unicodedata
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ticket_engine.errors import LabelsError

KEPT_FILE = "labels.json"
DEFAULT_INSTRUCTION = (
    "You label customer support tickets. Read the ticket and answer with the one label that fits it best. "
    "Answer with the label only."
)


@dataclass(frozen=True, slots=True)
class Label:
    """One class: its id in the data, the string that the model scores, what it means, and example tickets."""

    name: str
    description: str
    examples: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The string that the model scores: the name with spaces for underscores."""
        return self.name.replace("_", " ")


@dataclass(frozen=True, slots=True)
class LabelSet:
    """Labels in the order of the file, with the instruction of the prompt."""

    labels: tuple[Label, ...]
    instruction: str = DEFAULT_INSTRUCTION

    @property
    def names(self) -> tuple[str, ...]:
        """Class ids in the order of the file."""
        return tuple(label.name for label in self.labels)

    @property
    def content_hash(self) -> str:
        """SHA-256 of names, descriptions, examples and instruction, hexadecimal."""
        content = [self.instruction, [[x.name, x.description, *x.examples] for x in self.labels]]
        return hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()


class _LabelEntry(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(min_length=1)
    description: str = ""
    examples: list[Annotated[str, Field(min_length=1)]] = []


class _LabelsFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    labels: list[_LabelEntry] = Field(min_length=2)
    instruction: str = Field(default=DEFAULT_INSTRUCTION, min_length=1)
    metadata: dict | None = None


def read_labels(path: str | Path) -> LabelSet:
    """The label set of a YAML file.

    Args:
        path: File with ``labels:`` (a list of ``name``, ``description`` and ``examples``, the last two optional),
            optionally ``instruction:`` and ``metadata:`` (free).

    Raises:
        LabelsError: The file is missing, not YAML, has unknown keys, doubled names or
            label texts, names that people cannot tell apart or read, or fewer than two labels.
    """
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), _UniqueKeys)
    except FileNotFoundError:
        raise LabelsError(f"No labels file at {path}. Give a YAML file with --labels.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise LabelsError(f"The labels file {path} cannot be read: {type(error).__name__}.") from error
    except yaml.YAMLError as error:
        raise LabelsError(f"The labels file {path} is not YAML: {_one_line(str(error))}") from error
    try:
        parsed = _LabelsFile.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "top level"
        raise LabelsError(
            f"The labels file {path} is not usable at {where}: {first['msg']}. "
            "Allowed: labels (two or more of name, description, examples), instruction, metadata."
        ) from error
    labels = tuple(
        Label(label_name(entry.name), _spaced(entry.description), tuple(map(_spaced, entry.examples)))
        for entry in parsed.labels
    )
    for label in labels:
        _check_name(path, label.name)
    for kind, values in (("name", [x.name for x in labels]), ("text", [x.text for x in labels])):
        doubled = sorted({value for value in values if values.count(value) > 1})
        if doubled:
            raise LabelsError(f"The labels file {path} doubles the {kind} {doubled[0]!r}. Each must be unique.")
    seen: dict[str, str] = {}
    for label in labels:
        other = seen.setdefault(_looks(label.name), label.name)
        if other != label.name:
            raise LabelsError(
                f"The labels file {path} has the names {other!a} and {label.name!a}, which differ only by case, blanks or "
                "characters that nobody sees. Rename one."
            )
    return LabelSet(labels, parsed.instruction.strip())


def keep_labels(labels: LabelSet, folder: Path) -> None:
    """Note a run's label set in its folder: the labels file is read once a run."""
    (folder / KEPT_FILE).write_text(json.dumps(asdict(labels), ensure_ascii=False), encoding="utf-8")


def kept_labels(folder: Path) -> LabelSet:
    """The label set that `keep_labels` noted."""
    fields = json.loads((folder / KEPT_FILE).read_text(encoding="utf-8"))
    labels = (Label(x["name"], x["description"], tuple(x["examples"])) for x in fields["labels"])
    return LabelSet(tuple(labels), fields["instruction"])


def label_name(text: str) -> str:
    """A label's name as every reader takes it, from the labels file and from tables: without white space at its ends."""
    return text.strip()


def _check_name(path: str | Path, name: str) -> None:
    hidden = [char for char in name if unicodedata.category(char) in ("Cc", "Zl", "Zp", "Cs")]
    if hidden or not _looks(name):
        what = f"a control character or line break (U+{ord(hidden[0]):04X})" if hidden else "nothing that can be seen"
        raise LabelsError(f"The labels file {path} has a name with {what}: {name[:40]!a}. Use plain words.")


def _looks(name: str) -> str:
    """What people see of a name: no case, no blanks, no zero-width characters, one form of each letter."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    return "".join(c for c in folded.replace("_", " ") if not c.isspace() and unicodedata.category(c) != "Cf")


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which no key may stand twice; the last one would win without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        doubled = [key for place, key in enumerate(keys) if key in keys[:place]]
        if doubled:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {str(doubled[0])[:40]!r} stands twice", node.start_mark
            )
        return super().construct_mapping(node, deep)


def _spaced(text: str) -> str:
    return " ".join(text.split())


def _one_line(text: str) -> str:
    return _spaced(text)[:200]
