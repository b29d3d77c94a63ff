"""The prompt: one prefix and one ending shared by all tickets, and the token ids of every label.

The chat template is rendered once around a marker and cut at special tokens, because tokenizers split
a text at special tokens before anything else; tokenizing the pieces is then the same as tokenizing the
whole::

    <|im_start|>system\\n...labels...<|im_end|>\\n<|im_start|>  user\\n  TICKET  <|im_end|>\\n<|im_start|>assistant\\n
    └──────────────── head ────────────────────────────────┘ └lead─┘        └tail is empty
    └──────────── prompt prefix: head + lead ──────────────────────┘ ticket └──────── ending: tail + rest ──────┘

Lead, ticket and tail are tokenized together, with special tokens disabled; `tokenization` checks for
every ticket that the lead's and the tail's ids stand at its ends.
"""

import hashlib
import itertools
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ticket_engine.errors import LabelsError, ModelError
from ticket_engine.labels import LabelSet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKER = "\ue000TICKET\ue000"
ANSWER = "\ue000ANSWER\ue000"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of everything but the tickets.

    The whole prompt of a ticket is ``prefix_ids + ticket_ids + ending_ids``; a label's ids follow it.
    ``lead_ids`` are the last ids of ``prefix_ids``, ``tail_ids`` the first of ``ending_ids``.
    """

    prefix_ids: tuple[int, ...]
    ending_ids: tuple[int, ...]
    label_ids: tuple[tuple[int, ...], ...]
    lead_text: str
    lead_ids: tuple[int, ...]
    tail_text: str
    tail_ids: tuple[int, ...]

    @property
    def content_hash(self) -> str:
        """SHA-256 of all fields, hexadecimal."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()


def system_text(labels: LabelSet) -> str:
    """Instruction and label list as the model reads them; examples cost nothing a ticket, they are in the prefix."""
    lines = []
    for label in labels.labels:
        lines.append(f"- {label.text}: {label.description}".rstrip(": "))
        lines += [f"  For example: {example}" for example in label.examples]
    return "\n".join([labels.instruction, "", "Labels:", *lines])


def build_prompt(tokenizer: "PreTrainedTokenizerBase", labels: LabelSet) -> Prompt:
    """The prompt of a label set for one tokenizer.

    Raises:
        LabelsError: A label spells a special token, or the tokenizer takes two labels for the same.
        ModelError: The chat template does not show the ticket exactly once, or its pieces do not
            tokenize like the whole.
    """
    _check_special(labels, _special_texts(tokenizer))
    before, after, closing = _render(tokenizer, system_text(labels))
    head_text, lead_text = _split_last(before, _special_texts(tokenizer))
    tail_text, rest_text = _split_first(after, _special_texts(tokenizer))
    has_template = bool(tokenizer.chat_template)
    head_ids = _leading_ids(tokenizer, has_template) + _ids(tokenizer, head_text)
    lead_ids, tail_ids = _ids(tokenizer, lead_text), _ids(tokenizer, tail_text)
    rest_ids = _ids(tokenizer, rest_text)
    example = "Where is my parcel? It was due on 3 May."
    pieces = _ids(tokenizer, head_text) + _ids(tokenizer, lead_text + example + tail_text) + rest_ids
    if pieces != _ids(tokenizer, before + example + after):
        raise ModelError(
            "This model's prompt cannot be cut without changing its tokens. Choose a model with a ChatML-like template."
        )
    cue_text = rest_text or tail_text
    joint = "" if has_template else " "
    label_ids = tuple(_label_ids(tokenizer, cue_text, joint + label.text) for label in labels.labels)
    _check_distinct(labels, label_ids)
    if not _is_prefix_free(label_ids):
        end = closing or ((tokenizer.eos_token_id,) if tokenizer.eos_token_id is not None else ())
        if not end:
            raise ModelError("One label begins another and the model has no end token to tell them apart. Rename one.")
        label_ids = tuple(ids + end[:1] for ids in label_ids)
    return Prompt(
        prefix_ids=head_ids + lead_ids,
        ending_ids=tail_ids + rest_ids,
        label_ids=label_ids,
        lead_text=lead_text,
        lead_ids=lead_ids,
        tail_text=tail_text,
        tail_ids=tail_ids,
    )


def _check_special(labels: LabelSet, specials: tuple[str, ...]) -> None:
    """Text that spells a special token would become one and change the prompt's structure."""
    for label in labels.labels:
        for what, text in (("name", label.text), ("name", label.name), ("description", label.description)):
            found = next((special for special in specials if special and special in text), None)
            if found:
                raise LabelsError(
                    f"The {what} of the label {label.name[:40]!r} spells {found!r}, a special token of this model. Rename it."
                )
    texts = [labels.instruction, *(example for label in labels.labels for example in label.examples)]
    found = next((special for special in specials for text in texts if special and special in text), None)
    if found:
        raise LabelsError(
            f"The instruction or an example spells {found!r}, a special token of this model. Rephrase it."
        )


def _check_distinct(labels: LabelSet, label_ids: tuple[tuple[int, ...], ...]) -> None:
    seen: dict[tuple[int, ...], str] = {}
    for label, ids in zip(labels.labels, label_ids, strict=True):
        other = seen.setdefault(ids, label.name)
        if other != label.name:
            raise LabelsError(
                f"This model's tokenizer takes the labels {other[:40]!a} and {label.name[:40]!a} for the same. Rename one."
            )


def _render(tokenizer: "PreTrainedTokenizerBase", system: str) -> tuple[str, str, tuple[int, ...]]:
    """Text before the ticket, text after it, and the ids that close an answer."""
    if not tokenizer.chat_template:
        # The space keeps the line breaks apart from a full stop at the ticket's end: Qwen's and Llama 3's
        # tokenizers take ".\n\n" as one word, and the ticket would not fit the prompt.
        return f"{system}\n\nTicket:\n", " \n\nLabel:", ()
    from jinja2.exceptions import TemplateError

    chat = [{"role": "system", "content": system}, {"role": "user", "content": MARKER}]
    try:
        text = _apply(tokenizer, chat)
    except TemplateError:  # no system role, such as Gemma's
        chat = [{"role": "user", "content": f"{system}\n\nTicket:\n{MARKER}"}]
        text = _apply(tokenizer, chat)
    if text.count(MARKER) != 1:
        raise ModelError("The model's chat template does not show the ticket exactly once. Choose another model.")
    before, after = text.split(MARKER)
    answered = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": ANSWER}], tokenize=False)
    closing = _ids(tokenizer, answered.split(ANSWER)[1]) if answered.count(ANSWER) == 1 else ()
    return before, after, closing


def _apply(tokenizer: "PreTrainedTokenizerBase", chat: list[dict[str, str]]) -> str:
    # Qwen3 and its kin think aloud unless told not to; templates without the switch ignore it.
    return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, enable_thinking=False)


def _leading_ids(tokenizer: "PreTrainedTokenizerBase", has_template: bool) -> tuple[int, ...]:
    """The begin token that the tokenizer adds by itself; chat templates carry their own."""
    if has_template or tokenizer.bos_token_id is None:
        return ()
    added = tokenizer("x", add_special_tokens=True).input_ids
    return (tokenizer.bos_token_id,) if added[0] == tokenizer.bos_token_id else ()


def _label_ids(tokenizer: "PreTrainedTokenizerBase", cue_text: str, label_text: str) -> tuple[int, ...]:
    cue, both = _ids(tokenizer, cue_text), _ids(tokenizer, cue_text + label_text)
    if both[: len(cue)] != cue or len(both) == len(cue):
        raise ModelError(f"The label text {label_text!r} merges with the prompt's last token. Rename the label.")
    return both[len(cue) :]


def _ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False).input_ids) if text else ()


def _special_texts(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, ...]:
    return tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)


def _split_last(text: str, specials: tuple[str, ...]) -> tuple[str, str]:
    """The text up to the end of its last special token, and what follows."""
    cut = max((text.rfind(special) + len(special) for special in specials if special in text), default=0)
    return text[:cut], text[cut:]


def _split_first(text: str, specials: tuple[str, ...]) -> tuple[str, str]:
    """The text before its first special token, and what follows from there on."""
    cut = min((text.find(special) for special in specials if special in text), default=len(text))
    return text[:cut], text[cut:]


def _is_prefix_free(sequences: tuple[tuple[int, ...], ...]) -> bool:
    ordered = sorted(sequences)
    return all(second[: len(first)] != first for first, second in itertools.pairwise(ordered))
