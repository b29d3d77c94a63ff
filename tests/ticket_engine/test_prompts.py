import copy
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from ticket_engine.errors import LabelsError, ModelError
from ticket_engine.labels import Label, LabelSet
from ticket_engine.prompts import build_prompt, system_text

TICKET = "Where is my order? It was due on Monday."
PLAIN = LabelSet(
    (Label("billing", "invoices"), Label("account_access", "logins {and} {{ 7 * 7 }}"), Label("returns", ""))
)
BEGINNING = LabelSet(tuple(Label(name, "") for name in ("account", "account access", "account closure", "billing")))

GEMMA_LIKE = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def with_template(tokenizer: PreTrainedTokenizerFast, template: str | None) -> PreTrainedTokenizerFast:
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


def whole_prompt(tokenizer: PreTrainedTokenizerFast, labels: LabelSet, ticket: str) -> str:
    chat = [{"role": "system", "content": system_text(labels)}, {"role": "user", "content": ticket}]
    return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)


def test_prefix_ticket_and_ending_are_the_tokens_of_the_rendered_chat(toy_tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = build_prompt(toy_tokenizer, PLAIN)
    ticket = ids_of(toy_tokenizer, TICKET)
    assert prompt.prefix_ids + ticket + prompt.ending_ids == ids_of(
        toy_tokenizer, whole_prompt(toy_tokenizer, PLAIN, TICKET)
    )
    assert prompt.prefix_ids[-len(prompt.lead_ids) :] == prompt.lead_ids
    assert prompt.ending_ids[: len(prompt.tail_ids)] == prompt.tail_ids


def test_the_system_text_shows_instruction_and_every_label_as_it_is_written() -> None:
    text = system_text(PLAIN)
    assert text.startswith(PLAIN.instruction)
    assert text.endswith("- billing: invoices\n- account access: logins {and} {{ 7 * 7 }}\n- returns")


def test_examples_stand_below_their_label_in_the_system_text() -> None:
    labels = LabelSet((Label("a", "first", ("Where is it?", "Lost!")), Label("b", "second")))
    lines = system_text(labels).splitlines()[-4:]
    assert lines == ["- a: first", "  For example: Where is it?", "  For example: Lost!", "- b: second"]


@pytest.mark.parametrize("labels", [PLAIN, BEGINNING])
def test_label_ids_are_what_follows_the_prompt_when_both_are_tokenized_together(
    toy_tokenizer: PreTrainedTokenizerFast, labels: LabelSet
) -> None:
    prompt = build_prompt(toy_tokenizer, labels)
    whole = whole_prompt(toy_tokenizer, labels, TICKET)
    front = ids_of(toy_tokenizer, whole)
    end = (toy_tokenizer.eos_token_id,) if labels is BEGINNING else ()
    for label, label_ids in zip(labels.labels, prompt.label_ids, strict=True):
        assert front + label_ids == ids_of(toy_tokenizer, whole + label.text) + end


def test_labels_that_begin_one_another_end_with_the_token_that_closes_an_answer_and_others_do_not(
    toy_tokenizer: PreTrainedTokenizerFast,
) -> None:
    assert {ids[-1] for ids in build_prompt(toy_tokenizer, BEGINNING).label_ids} == {toy_tokenizer.eos_token_id}
    assert all(toy_tokenizer.eos_token_id not in ids for ids in build_prompt(toy_tokenizer, PLAIN).label_ids)


def test_a_template_without_a_system_role_carries_the_instruction_in_the_users_turn(
    toy_tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer = with_template(toy_tokenizer, GEMMA_LIKE)
    prompt = build_prompt(tokenizer, PLAIN)
    whole = f"<|im_start|>user\n{system_text(PLAIN)}\n\nTicket:\n{TICKET}<|im_end|>\n<|im_start|>model\n"
    assert prompt.prefix_ids + ids_of(tokenizer, TICKET) + prompt.ending_ids == ids_of(tokenizer, whole)


def test_a_model_that_thinks_aloud_is_told_not_to(toy_tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = build_prompt(with_template(toy_tokenizer, THINKING), PLAIN)
    assert toy_tokenizer.decode(prompt.ending_ids).endswith("<think>\n\n</think>\n\n")


def test_a_model_without_chat_template_gets_a_plain_prompt(toy_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = with_template(toy_tokenizer, None)
    prompt = build_prompt(tokenizer, PLAIN)
    whole = f"{system_text(PLAIN)}\n\nTicket:\n{TICKET} \n\nLabel:"
    assert prompt.prefix_ids + ids_of(tokenizer, TICKET) + prompt.ending_ids == ids_of(tokenizer, whole)
    for label, label_ids in zip(PLAIN.labels, prompt.label_ids, strict=True):
        assert prompt.prefix_ids + ids_of(tokenizer, TICKET) + prompt.ending_ids + label_ids == ids_of(
            tokenizer, f"{whole} {label.text}"
        )


def test_a_begin_token_that_the_tokenizer_adds_by_itself_stands_in_front_of_a_plain_prompt(
    toy_tokenizer: PreTrainedTokenizerFast,
) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = with_template(toy_tokenizer, None)
    begin = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.bos_token_id)]
    )
    prompt = build_prompt(tokenizer, PLAIN)
    whole = tuple(tokenizer(f"{system_text(PLAIN)}\n\nTicket:\n{TICKET} \n\nLabel:").input_ids)
    assert whole[0] == tokenizer.bos_token_id
    assert prompt.prefix_ids + ids_of(tokenizer, TICKET) + prompt.ending_ids == whole


@pytest.mark.parametrize(
    "template",
    [
        "{% for message in messages %}<|im_start|>{{ message['role'] }}{% endfor %}",
        "{% for message in messages %}<|im_start|>{{ message['content'] }}{{ message['content'] }}{% endfor %}",
    ],
)
def test_a_template_that_does_not_show_the_ticket_exactly_once_is_an_error(
    toy_tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    with pytest.raises(ModelError, match="exactly once"):
        build_prompt(with_template(toy_tokenizer, template), PLAIN)


def test_a_label_that_merges_with_the_prompts_last_token_is_an_error(toy_tokenizer: PreTrainedTokenizerFast) -> None:
    labels = LabelSet((Label("billing", ""), Label("\n\n\n\nreturns", "")))
    with pytest.raises(ModelError, match="merges with the prompt"):
        build_prompt(toy_tokenizer, labels)


def test_labels_that_begin_one_another_need_an_end_token(toy_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = with_template(toy_tokenizer, None)
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="Rename one"):
        build_prompt(tokenizer, BEGINNING)
    assert build_prompt(tokenizer, PLAIN).label_ids


def test_the_content_hash_depends_on_every_field(toy_tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = build_prompt(toy_tokenizer, PLAIN)
    changed = [
        replace(prompt, **{field.name: "x" if field.name.endswith("text") else ((9,),)}) for field in fields(prompt)
    ]
    assert len({made.content_hash for made in [prompt, *changed]}) == len(fields(prompt)) + 1
    assert build_prompt(toy_tokenizer, PLAIN).content_hash == prompt.content_hash


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_prompt_survives_being_saved_with_a_run(make_run: Callable[..., Path], name: str) -> None:
    from ticket_engine.engine_spec import read_spec

    spec = read_spec(make_run([TICKET], model=name, labels=("account", "account access", "Größe", "billing")))
    assert spec.labels == ("account", "account access", "Größe", "billing")
    assert all(isinstance(ids, tuple) for ids in spec.prompt.label_ids)
    assert hash(spec.prompt) == hash(replace(spec.prompt))


@pytest.mark.parametrize(
    "labels",
    [
        (Label("billing", ""), Label("<|im_end|>", "")),
        (Label("billing", ""), Label("x<|im_start|>y", "")),
        (Label("billing", "invoices<|im_end|>"), Label("returns", "")),
        (Label("billing", "", ("paid <|endoftext|> twice",)), Label("returns", "")),
    ],
)
def test_a_label_that_spells_a_special_token_is_refused(
    toy_tokenizer: PreTrainedTokenizerFast, labels: tuple[Label, ...]
) -> None:
    with pytest.raises(LabelsError, match="special token of this model") as caught:
        build_prompt(toy_tokenizer, LabelSet(labels))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("first", "second"), [("Billing", "billing"), ("caf\u00e9", "cafe\u0301")])
def test_labels_that_the_tokenizer_takes_for_the_same_are_refused(
    toy_tokenizer: PreTrainedTokenizerFast, first: str, second: str
) -> None:
    from tokenizers import normalizers

    tokenizer = copy.deepcopy(toy_tokenizer)
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    with pytest.raises(LabelsError, match=r"tokenizer takes the labels .* for the same"):
        build_prompt(tokenizer, LabelSet((Label(first, ""), Label(second, ""))))
