"""Measures which words of the sample tickets are more than one token: ``python -m samples.measure_tokens``.

Writes `token_lengths.json`. Needed only after a change of `phrases.yaml`, and the only part that wants the model.
"""

import itertools
import json
import re
from collections.abc import Iterable

from tokenizers import Tokenizer

from samples.sample_tickets import HERE, LIST_HEAD, WORDS, phrases
from ticket_engine.models import find_model
from ticket_engine.settings import EMBEDDED_MODEL


def measure(tokenizer: Tokenizer) -> dict[str, int]:
    """Words and signs of the phrases, with and without a space before them, that are not one token; digits aside."""
    texts = list(_strings(phrases()))
    plain = [re.sub(r"\{\w+\}", "", text) for text in [*texts, LIST_HEAD, "- E"]]
    words = {word.strip() for text in [*plain, *map(str.lower, plain)] for word in WORDS.findall(text)}
    forms = sorted(itertools.chain.from_iterable((word, f" {word}") for word in words if word))
    lengths = {form: len(tokenizer.encode(form, add_special_tokens=False).ids) for form in forms}
    return {form: length for form, length in lengths.items() if length != 1}


def _strings(node: object) -> Iterable[str]:
    if isinstance(node, dict):
        return itertools.chain.from_iterable(_strings(value) for value in node.values())
    if isinstance(node, list):
        return itertools.chain.from_iterable(_strings(value) for value in node)
    return (str(node),)


def main() -> None:
    """Write `token_lengths.json` from the embedded model's tokenizer."""
    tokenizer = Tokenizer.from_file(str(find_model(EMBEDDED_MODEL) / "tokenizer.json"))
    text = json.dumps(measure(tokenizer), indent=0, ensure_ascii=False)
    (HERE / "token_lengths.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
