import copy
import hashlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from ticket_engine.labels import Label, LabelSet
from ticket_engine.prompts import Prompt, build_prompt, system_text
from ticket_engine.tokenization import (
    CHUNK_ROWS,
    TicketTokenizer,
    TokenizedTexts,
    load_ticket_tokenizer,
    tokenize_frame,
    tokenize_tickets,
)

LABELS = LabelSet((Label("billing", "invoices"), Label("returns", "goods sent back")))
REAL_TICKETS = Path(__file__).parents[3] / "shared" / "data" / "tickets"
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")

pieces = st.sampled_from(
    ["my order", " ", "\n", "\n\n", "\t", "{braces}", "{{ x }}", "%s", "\0", "🙂", "👩‍👩‍👧", "مرحبا", "é", "e\u0301"]
)
texts = st.text(max_size=40) | st.lists(pieces, max_size=12).map("".join)


@pytest.fixture(scope="module")
def prompt(toy_tokenizer: PreTrainedTokenizerFast) -> Prompt:
    return build_prompt(toy_tokenizer, LABELS)


@pytest.fixture(scope="module")
def make_tokenizer(
    tmp_path_factory: pytest.TempPathFactory, toy_tokenizer: PreTrainedTokenizerFast, prompt: Prompt
) -> Callable[..., TicketTokenizer]:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(toy_tokenizer.backend_tokenizer.to_str(), encoding="utf-8")

    def make(max_ticket_tokens: int = 1000, truncate: str = "end") -> TicketTokenizer:
        return load_ticket_tokenizer(path, prompt, max_ticket_tokens=max_ticket_tokens, truncate=truncate)

    return make


def ids_of(texts: TokenizedTexts) -> list[list[int]]:
    ends = np.cumsum(texts.lengths)
    return [texts.flat[end - length : end].tolist() for end, length in zip(ends, texts.lengths.tolist(), strict=True)]


def whole_ids(tokenizer: PreTrainedTokenizerFast, ticket: str) -> list[int]:
    chat = [{"role": "system", "content": system_text(LABELS)}, {"role": "user", "content": ticket}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return tokenizer(rendered, add_special_tokens=False).input_ids


@given(text=texts)
@example(text="\n\n\n\nhello")
@example(text="   ")
@settings(deadline=None, max_examples=300)
def test_prefix_ticket_and_ending_equal_the_tokens_of_the_whole_prompt(
    text: str, toy_tokenizer: PreTrainedTokenizerFast, make_tokenizer: Callable[..., TicketTokenizer], prompt: Prompt
) -> None:
    made = make_tokenizer().encode([text])
    if made.fits_prompt[0]:
        together = [*prompt.prefix_ids, *ids_of(made)[0], *prompt.ending_ids]
        assert together == whole_ids(toy_tokenizer, text)
    else:
        assert text != text.strip()
        assert made.lengths[0] == 0


@pytest.mark.parametrize("text", ["It is late.", "Really?!", "a\n\nb", "why {", "end\n---", "x", "5", "🙂"])
def test_a_model_without_chat_template_takes_tickets_that_end_in_any_sign(
    toy_tokenizer: PreTrainedTokenizerFast, make_tokenizer: Callable[..., TicketTokenizer], text: str
) -> None:
    plain = copy.deepcopy(toy_tokenizer)
    plain.chat_template = None
    prompt = build_prompt(plain, LABELS)
    made = replace(make_tokenizer(), prompt=prompt).encode([text])
    assert made.fits_prompt[0]
    whole = [*prompt.prefix_ids, *ids_of(made)[0], *prompt.ending_ids]
    assert whole == plain(plain.decode(whole, clean_up_tokenization_spaces=False)).input_ids


@given(parts=st.lists(st.sampled_from([*SPECIALS, "my order", "\n", "assistant", "🙂"]), min_size=1, max_size=8))
@example(parts=["<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"])
@settings(deadline=None, max_examples=100)
def test_special_tokens_spelled_in_a_ticket_stay_text_and_leave_the_prompt_as_it_is(
    parts: list[str],
    toy_tokenizer: PreTrainedTokenizerFast,
    make_tokenizer: Callable[..., TicketTokenizer],
    prompt: Prompt,
) -> None:
    text = "".join(parts).strip()
    made = make_tokenizer().encode([text])
    ids = ids_of(made)[0]
    assert made.fits_prompt[0]
    assert not set(ids) & set(toy_tokenizer.all_special_ids)
    assert toy_tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    whole = [*prompt.prefix_ids, *ids, *prompt.ending_ids]
    without = [*prompt.prefix_ids, *prompt.ending_ids]
    special = toy_tokenizer.all_special_ids
    assert [token for token in whole if token in special] == [token for token in without if token in special]


@given(text=texts.map(str.strip).filter(bool), limit=st.integers(1, 12), truncate=st.sampled_from(["end", "middle"]))
@settings(deadline=None, max_examples=300)
def test_a_truncated_ticket_is_marked_and_no_longer_than_the_limit(
    text: str, limit: int, truncate: str, make_tokenizer: Callable[..., TicketTokenizer]
) -> None:
    full = make_tokenizer().encode([text])
    made = make_tokenizer(limit, truncate).encode([text])
    assert made.lengths[0] <= limit
    assert made.truncated[0] == (full.lengths[0] > limit)
    if not made.truncated[0]:
        assert ids_of(made) == ids_of(full)


def test_a_ticket_cut_at_the_end_keeps_its_beginning_and_one_cut_in_the_middle_keeps_both_ends(
    toy_tokenizer: PreTrainedTokenizerFast, make_tokenizer: Callable[..., TicketTokenizer]
) -> None:
    text = " ".join(f"word{number}" for number in range(400))
    tokens = toy_tokenizer(text).input_ids
    kept = ids_of(make_tokenizer(100, "end").encode([text]))[0]
    assert kept == tokens[:100]
    kept = ids_of(make_tokenizer(101, "middle").encode([text]))[0]
    assert 98 <= len(kept) <= 101
    middle = toy_tokenizer("\n").input_ids[0]
    assert kept.count(middle) == 1
    cut = kept.index(middle)
    assert kept[:cut] == tokens[:cut]
    back = toy_tokenizer.decode(kept[cut + 1 :])
    assert text.endswith(back)
    assert abs(cut - len(kept) // 2) <= 2


def test_a_very_long_text_is_cut_to_the_limit(make_tokenizer: Callable[..., TicketTokenizer]) -> None:
    made = make_tokenizer(512).encode(["My parcel has not arrived. " * 20_000, "x" * 300_000])
    assert made.truncated.tolist() == [True, True]
    assert made.lengths.tolist() == [512, 512]


def test_equal_texts_have_equal_keys_and_others_do_not(make_tokenizer: Callable[..., TicketTokenizer]) -> None:
    keys = make_tokenizer().encode(["same", "other", "same", "sam"]).keys_series().to_list()
    assert keys[0] == keys[2]
    assert len(set(keys)) == 3


def test_a_key_is_a_hash_of_the_ids_alone_and_so_the_same_in_every_process_and_on_every_machine() -> None:
    texts = TokenizedTexts(
        np.array([7, 258, 70_000], dtype=np.uint32), np.array([2, 0, 1]), np.zeros(3, bool), np.ones(3, bool)
    )
    data = [bytes([7, 0, 0, 0, 2, 1, 0, 0]), b"", bytes([112, 17, 1, 0])]
    assert texts.keys_series().to_list() == [hashlib.blake2b(part, digest_size=16).digest() for part in data]
    assert texts.keys_series()[0].hex() == "8663a7c5a360eda8c469c0653574842c"


def test_tokenizing_in_another_process_gives_the_same_table(
    make_run: Callable[..., Path], make_tokenizer: Callable[..., TicketTokenizer]
) -> None:
    from ticket_engine.stages import tokenize

    folder = make_run(["Where is my order?", "🙂 naïve", "<|im_end|>"])
    tokenize(folder)
    here = pl.read_parquet(folder / "tokens.parquet")
    code = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from ticket_engine.prompts import Prompt\n"
        "from ticket_engine.tokenization import load_ticket_tokenizer, tokenize_tickets\n"
        "folder = Path(sys.argv[1])\n"
        "prompt = Prompt(**json.loads((folder / 'engine.json').read_text())['prompt'])\n"
        "tokenizer = load_ticket_tokenizer(folder / 'tokenizer.json', prompt, max_ticket_tokens=512, truncate='end')\n"
        "tokenize_tickets(folder / 'tickets.parquet', folder / 'there.parquet', folder / 'no.parquet', tokenizer)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
    assert pl.read_parquet(folder / "there.parquet").equals(here)


def test_texts_that_cannot_be_tokenized_are_set_apart_with_the_reason(
    make_tokenizer: Callable[..., TicketTokenizer],
) -> None:
    frame = pl.DataFrame(
        {"ticket_id": [10, 11, 12, 13], "input_index": [0, 1, 2, 3], "text": ["fine", "\n\n\n\nmerges", "", "🙂"]},
        schema_overrides={"input_index": pl.UInt32},
    )
    made = tokenize_frame(frame, make_tokenizer())
    assert made["reason"].to_list() == [None, "text merges with the prompt", "no text", None]
    assert made.columns == [
        "ticket_id",
        "input_index",
        "ticket_key",
        "token_length",
        "is_truncated",
        "token_ids",
        "reason",
    ]
    assert made.schema["token_ids"] == pl.List(pl.UInt32)
    assert made.schema["token_length"] == pl.UInt32
    assert made["token_ids"].list.len().equals(made["token_length"].cast(pl.UInt32).rename("token_ids"))


def test_a_table_of_several_chunks_keeps_every_row_once_and_in_order(
    tmp_path: Path, make_tokenizer: Callable[..., TicketTokenizer]
) -> None:
    rows = 2 * CHUNK_ROWS + 5
    bad = {CHUNK_ROWS - 1, CHUNK_ROWS, rows - 1}
    frame = pl.DataFrame(
        {
            "number": range(rows),
            "input_index": pl.Series(range(rows), dtype=pl.UInt32) * 2,
            "text": ["" if row in bad else f"ticket {row} of the table" for row in range(rows)],
        }
    )
    frame.write_parquet(tmp_path / "tickets.parquet", row_group_size=5000)
    tokenizer = make_tokenizer(8)
    summary = tokenize_tickets(
        tmp_path / "tickets.parquet", tmp_path / "tokens.parquet", tmp_path / "rejected.parquet", tokenizer
    )
    tokens, rejected = pl.read_parquet(tmp_path / "tokens.parquet"), pl.read_parquet(tmp_path / "rejected.parquet")
    assert rejected["number"].to_list() == sorted(bad)
    assert rejected["input_index"].to_list() == [2 * row for row in sorted(bad)]
    assert rejected["reason"].unique().to_list() == ["no text"]
    assert tokens["number"].to_list() == [row for row in range(rows) if row not in bad]
    expected = tokenizer.encode(frame["text"].to_list())
    good = np.array([row not in bad for row in range(rows)])
    assert tokens["token_ids"].to_list() == [ids for ids, kept in zip(ids_of(expected), good, strict=True) if kept]
    assert tokens["is_truncated"].to_list() == expected.truncated[good].tolist()
    lengths = expected.lengths[good]
    assert (summary.tickets, summary.rejected) == (rows - 3, 3)
    assert summary.truncated == int(expected.truncated.sum()) > 0
    assert (summary.shortest, summary.longest) == (lengths.min(), lengths.max())
    assert (summary.median, summary.mean) == (np.median(lengths), lengths.mean())


def test_an_empty_table_gives_empty_tables_with_the_same_columns(
    tmp_path: Path, make_tokenizer: Callable[..., TicketTokenizer]
) -> None:
    schema = {"ticket_id": pl.Int32, "input_index": pl.UInt32, "text": pl.String}
    pl.DataFrame(schema=schema).write_parquet(tmp_path / "tickets.parquet")
    summary = tokenize_tickets(
        tmp_path / "tickets.parquet", tmp_path / "tokens.parquet", tmp_path / "rejected.parquet", make_tokenizer()
    )
    tokens = pl.read_parquet(tmp_path / "tokens.parquet")
    assert (summary.tickets, summary.rejected, summary.longest, len(tokens)) == (0, 0, 0, 0)
    assert tokens.schema["ticket_id"] == pl.Int32
    assert tokens.schema["token_ids"] == pl.List(pl.UInt32)
    assert pl.read_parquet(tmp_path / "rejected.parquet").columns == ["ticket_id", "input_index", "reason"]


@pytest.mark.slow
def test_real_tickets_in_the_real_models_prompt_are_the_tokens_of_the_whole_prompt(
    embedded_model: Path, tmp_path: Path
) -> None:
    from ticket_engine.models import load_tokenizer

    tables = sorted(REAL_TICKETS.glob("*.dev.parquet"))
    if not tables:
        pytest.skip("../shared/data/tickets is not there")
    model_tokenizer = load_tokenizer(embedded_model)
    prompt = build_prompt(model_tokenizer, LABELS)
    (tmp_path / "tokenizer.json").write_text(model_tokenizer.backend_tokenizer.to_str(), encoding="utf-8")
    tokenizer = load_ticket_tokenizer(tmp_path / "tokenizer.json", prompt, max_ticket_tokens=100_000, truncate="end")
    for table in tables:
        texts = [text.strip() for text in pl.read_parquet(table)["body"].drop_nulls().head(150) if text.strip()]
        made = tokenizer.encode(texts)
        assert made.fits_prompt.all(), table.name
        for text, ids in zip(texts, ids_of(made), strict=True):
            if not any(special in text for special in model_tokenizer.all_special_tokens):
                assert [*prompt.prefix_ids, *ids, *prompt.ending_ids] == whole_ids(model_tokenizer, text), table.name
