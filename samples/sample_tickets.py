"""Sample tickets of an invented shop, with gold labels, whose token lengths follow the published spread.

A ticket is made of sentences of `phrases.yaml` until it has exactly the token length that was drawn for it. Lengths
are counted without a tokenizer: SmolLM2's splits a text into words, digits and signs, and the few words that are
more than one token stand in `token_lengths.json`, measured once by `samples.measure_tokens`.

Run as ``python -m samples.sample_tickets --output PATH [--tickets 600] [--seed 0]``.
"""

import argparse
import json
import random
import re
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path

import polars as pl
import yaml

HERE = Path(__file__).parent
WORDS = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?\d+| ?[^\s\w]+|\s+(?!\S)|\s+")
SHORTEST, MEDIAN, LONGEST = 48, 94, 449  # tokens, published; the mean there is about 121
LIST_HEAD = "What I know and what I tried:"
MOST_ASIDES, MOST_BESIDE, MOST_PASSAGES = 4, 2, 2
SECOND_MATTER_SHARE = 0.5
SHORTEST_SENTENCE = 4  # tokens
MOST_ATTEMPTS = 2000


def make_tickets(tickets: int, seed: int) -> pl.DataFrame:
    """Tickets with ``ticket_id``, ``subject`` (some null), ``body`` and ``label``, all strings, no text twice.

    Labels are as equally frequent as they can be. The same numbers give the same tickets, always.
    """
    rng = random.Random(seed)
    lengths = target_lengths(tickets)
    rng.shuffle(lengths)
    names = list(phrases()["labels"])
    labels = [names[index % len(names)] for index in range(tickets)]
    rng.shuffle(labels)
    texts: dict[tuple[str | None, str], None] = {}
    for label, length in zip(labels, lengths, strict=True):
        texts[_compose(rng, label, length, texts)] = None
    return pl.DataFrame(
        {
            "ticket_id": [f"sample-{index:06}" for index in range(tickets)],
            "subject": [subject for subject, _ in texts],
            "body": [body for _, body in texts],
            "label": labels,
        },
        schema=dict.fromkeys(("ticket_id", "subject", "body", "label"), pl.String),
    )


def target_lengths(tickets: int) -> list[int]:
    """Token lengths, ascending: shortest 48, median 94, mean about 121, longest 449 for any number but a few.

    Evenly spread up to the median; above it the same slope, plus a steep end::

        94 + 46 v + 309 v**4.72,   v = 0 at the median, 1 at the longest
    """
    half = MEDIAN - SHORTEST
    lengths = []
    for index in range(tickets):
        place = 2 * index / max(1, tickets - 1) - 1
        tail = (LONGEST - MEDIAN - half) * max(0.0, place) ** 4.72
        lengths.append(round(MEDIAN + half * place + tail))
    return lengths


@lru_cache(maxsize=100_000)
def count_tokens(text: str) -> int:
    """Tokens of a text of this module, as SmolLM2's tokenizer counts them."""
    known = token_lengths()
    return sum(len(word) if word[-1].isdigit() else known.get(word, 1) for word in WORDS.findall(text))


@cache
def phrases() -> dict:
    """The content of `phrases.yaml`."""
    return yaml.safe_load((HERE / "phrases.yaml").read_text(encoding="utf-8"))


@cache
def token_lengths() -> dict[str, int]:
    """Words, with the space before them if there is one, that are not one token."""
    return json.loads((HERE / "token_lengths.json").read_text(encoding="utf-8"))


def _compose(rng: random.Random, label: str, length: int, taken: dict) -> tuple[str | None, str]:
    """Subject (``None`` if there is none) and body of a new ticket with exactly ``length`` tokens."""
    for _ in range(MOST_ATTEMPTS):
        ticket = _attempt(rng, label, length)
        if ticket and ticket not in taken:
            return ticket
    raise RuntimeError(f"No {label} ticket of {length} tokens in {MOST_ATTEMPTS} attempts: phrases.yaml has too little")


def _attempt(rng: random.Random, label: str, length: int) -> tuple[str | None, str] | None:
    """Subject and body with ``length`` tokens; ``None`` if what was drawn does not come out even."""
    scenario = rng.choice(phrases()["labels"][label]["scenarios"])
    say = _voice(rng, scenario)
    general = phrases()["general"]
    subjects = scenario["subjects"] if rng.random() < 0.6 else general["subjects"]
    subject = say(rng.choice(subjects)) if rng.random() < 0.92 else None
    asks = scenario["asks"] if rng.random() < 0.7 else general["asks"]
    as_list = length > 150 and rng.random() < 0.4  # some people write lists
    parts = {
        "story": [say(rng.choice(scenario["openings"]))],
        "tried": [say(LIST_HEAD)] if as_list else [],
        "passages": [],
        "last": [say(rng.choice(asks))],
        "second": [],
    }
    ends = _ends(rng, say)
    left = length - count_tokens(_text(subject, _body(parts, as_list)))
    reserved = ends[0][0]  # tokens that a greeting and a closing may take, drawn like these
    for kind, text in _in_random_order(rng, label, scenario):
        if left - reserved < SHORTEST_SENTENCE:
            break
        sentence = say(text)
        joint = "\n\n" if kind == "passages" or not parts[kind] else "\n- " if as_list and kind == "tried" else " "
        if (cost := count_tokens(joint + sentence)) <= left - reserved:
            parts[kind].append(sentence)
            left -= cost
    if as_list and len(parts["tried"]) < 4:
        return None
    parts["last"] = parts["last"][1:] + parts["last"][:1]  # what is asked for comes last
    middle = _body(parts, as_list)
    left = length - count_tokens(_text(subject, middle))
    for cost, greeting, closing in ends:
        if cost == left:
            return subject, "\n\n".join(part for part in (greeting, middle, closing) if part)
    return None


def _voice(rng: random.Random, scenario: dict) -> Callable[[str], str]:
    """Fills the slots of a sentence, always with the same values; a few people never use the shift key."""
    slots = _draw_slots(rng, scenario)
    if rng.random() < 0.07:
        return lambda text: text.format_map(slots).lower()
    return lambda text: text.format_map(slots)


def _draw_slots(rng: random.Random, scenario: dict) -> dict[str, str]:
    """A value for every slot."""
    slots = {name: rng.choice(values) for name, values in phrases()["slots"].items()}
    day, month = rng.randint(1, 17), rng.choice(phrases()["slots"]["month"])
    return slots | {
        "device": rng.choice(scenario.get("devices", phrases()["slots"]["device"])),
        "order": "".join(rng.choices("0123456789", k=rng.randint(6, 8))),
        "amount": f"{rng.randint(19, 489)}.{rng.choice(('00', '50', '90', '95', '99'))}",
        "fee": str(rng.randint(4, 45)),
        "date": f"{day} {month}",
        "date2": f"{day + rng.randint(2, 11)} {month}",
        "minutes": str(rng.randint(10, 55)),
        "days": str(rng.randint(8, 40)),
        "card": str(rng.randint(1000, 9999)),
        "version": f"{rng.randint(2, 6)}.{rng.randint(0, 12)}.{rng.randint(0, 9)}",
        "code": f"E{rng.randint(100, 599)}",
        "percent": str(rng.randint(12, 98)),
    }


def _in_random_order(rng: random.Random, label: str, scenario: dict) -> list[tuple[str, str]]:
    """Sentences that may go into a ticket, with the paragraph they belong to; what matters tends to come first."""
    general, own = phrases()["general"], phrases()["labels"][label]
    beside = [text for other, texts in general["beside_the_point"].items() if other != label for text in texts]
    pools = (
        ("story", scenario["details"], 0.7),
        ("tried", scenario["tried"], 1.0),
        ("tried", own["history"], 1.5),
        ("last", rng.sample(beside, MOST_BESIDE), 2.5),
        ("last", rng.sample(general["asides"], MOST_ASIDES), 2.5),
        ("passages", own["passages"], 3.5),
        ("passages", rng.sample(general["passages"], MOST_PASSAGES), 4.0),
        ("second", [_second_matter(rng, label)] if rng.random() < SECOND_MATTER_SHARE else [], 0.5),
    )
    order = [(rng.random() * late, kind, text) for kind, texts, late in pools for text in texts]
    return [(kind, text) for _, kind, text in sorted(order)]


def _second_matter(rng: random.Random, label: str) -> str:
    """A sentence about another label's subject; the ticket's label stays what it mainly asks for."""
    other = rng.choice([name for name in phrases()["labels"] if name != label])
    scenario = rng.choice(phrases()["labels"][other]["scenarios"])
    return f"{rng.choice(phrases()['general']['second_matter'])} {rng.choice(scenario['openings'])}"


def _ends(rng: random.Random, say: Callable[[str], str]) -> list[tuple[int, str, str]]:
    """Pairs of greeting and closing, either may be empty, with the tokens that a pair takes; in random order."""
    greetings = [say(text) for text in phrases()["general"]["greetings"]] + [""] * 4
    closings = [say(text) for text in phrases()["general"]["closings"]] + [""] * 4
    before = [(count_tokens(f"{text}\n\n.") - 1 if text else 0, text) for text in greetings]
    after = [(count_tokens(f"\n\n{text}") if text else 0, text) for text in closings]
    pairs = [(a + b, greeting, closing) for a, greeting in before for b, closing in after]
    return rng.sample(pairs, len(pairs))


def _body(parts: dict[str, list[str]], as_list: bool) -> str:
    tried = ("\n- " if as_list else " ").join(parts["tried"])
    paragraphs = (" ".join(parts["story"]), tried, *parts["passages"], " ".join(parts["last"]), *parts["second"])
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def _text(subject: str | None, body: str) -> str:
    return f"{subject}\n{body}" if subject else body


def main() -> None:
    """Write sample tickets to a Parquet file."""
    parser = argparse.ArgumentParser(prog="python -m samples.sample_tickets", description=main.__doc__)
    parser.add_argument("--output", type=Path, required=True, help="Parquet file to write")
    parser.add_argument("--tickets", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.tickets < 1:
        parser.error(f"--tickets is {options.tickets}, allowed is 1 or more")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    make_tickets(options.tickets, options.seed).write_parquet(options.output)
    print(f"{options.tickets} tickets written to {options.output}")


if __name__ == "__main__":
    main()
