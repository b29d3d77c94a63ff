"""From ticket texts to token ids, length columns and keys, a chunk at a time."""

import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from ticket_engine.prompts import Prompt
from ticket_engine.schemas import (
    INPUT_INDEX,
    IS_TRUNCATED,
    REASON,
    REASON_NO_TEXT,
    REASON_PROMPT_BOUNDARY,
    TEXT,
    TICKET_KEY,
    TOKEN_IDS,
    TOKEN_LENGTH,
)

CHUNK_ROWS = 8192
KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class TokenizeSummary:
    """What tokenizing a table gave. Lengths are tokens of the ticket itself, without prompt."""

    tickets: int
    truncated: int
    rejected: int
    shortest: int
    median: float
    mean: float
    longest: int


@dataclass(frozen=True, slots=True)
class TicketTokenizer:
    """A fast tokenizer with what it needs to know about the prompt and the length limit."""

    tokenizer: Tokenizer
    prompt: Prompt
    max_ticket_tokens: int
    truncate: str

    def encode(self, texts: list[str]) -> "TokenizedTexts":
        """Token ids of ticket texts inside the prompt.

        Special tokens are disabled, so that a text which spells one stays text. ``prefix_ids + ids +
        ending_ids`` equals the tokenization of the whole prompt; texts for which it does not are
        marked in ``fits_prompt``.
        """
        ids = self._ticket_ids(texts)
        truncated = np.zeros(len(texts), dtype=bool)
        for index in [index for index, row in enumerate(ids) if row is not None and len(row) > self.max_ticket_tokens]:
            ids[index] = self._shortened_ids(texts[index])
            truncated[index] = True
        lengths = np.fromiter((len(row or ()) for row in ids), dtype=np.int64, count=len(ids))
        numbers = array("I")
        for row in ids:
            numbers.fromlist(row or [])
        flat = np.frombuffer(numbers, dtype=np.uint32) if numbers else np.zeros(0, dtype=np.uint32)
        fits = np.fromiter((row is not None for row in ids), dtype=bool, count=len(ids))
        return TokenizedTexts(flat, lengths, truncated, fits)

    def _ticket_ids(self, texts: list[str]) -> list[list[int] | None]:
        prompt = self.prompt
        inputs = [prompt.lead_text + text + prompt.tail_text for text in texts]
        lead, tail = list(prompt.lead_ids), list(prompt.tail_ids)
        result: list[list[int] | None] = []
        for encoding in self.tokenizer.encode_batch_fast(inputs, add_special_tokens=False):
            ids = encoding.ids
            end = len(ids) - len(tail)
            fits = ids[: len(lead)] == lead and ids[end:] == tail and end >= len(lead)
            result.append(ids[len(lead) : end] if fits else None)
        return result

    def _shortened_ids(self, text: str) -> list[int] | None:
        """Ids of the text cut at token borders until it fits; the cut text is tokenized again."""
        offsets = self.tokenizer.encode(text, add_special_tokens=False).offsets
        kept = self.max_ticket_tokens
        while kept > 0:
            head = kept if self.truncate == "end" else (kept + 1) // 2
            tail = kept - head
            shorter = text[: offsets[head - 1][1]]
            if tail:
                shorter = shorter + "\n" + text[offsets[-tail][0] :]
            ids = self._ticket_ids([shorter.strip()])[0]
            if ids is None or len(ids) <= self.max_ticket_tokens:
                return ids
            kept -= len(ids) - self.max_ticket_tokens
        return None


@dataclass(frozen=True, slots=True)
class TokenizedTexts:
    """Ids of many texts end to end: ``flat`` uint32, ``lengths`` int64, ``truncated`` and ``fits_prompt`` bool."""

    flat: np.ndarray
    lengths: np.ndarray
    truncated: np.ndarray
    fits_prompt: np.ndarray

    def ids_series(self) -> pl.Series:
        """The ids as one `list[u32]` value a text."""
        offsets = pa.array(np.concatenate([[0], np.cumsum(self.lengths)]), type=pa.int64())
        return pl.Series(TOKEN_IDS, pl.from_arrow(pa.LargeListArray.from_arrays(offsets, pa.array(self.flat))))

    def keys_series(self, texts: list[str] | None = None) -> pl.Series:
        """A hash of each text's ids, and of the text where given: equal ones have equal keys, across runs and machines."""
        data, width = self.flat.astype("<u4", copy=False).tobytes(), 4
        ends = np.cumsum(self.lengths)
        spans = zip((ends - self.lengths).tolist(), ends.tolist(), strict=True)
        rows = [data[a * width : b * width] for a, b in spans]
        if texts is not None:
            rows = [row + text.encode("utf-8", "surrogatepass") for row, text in zip(rows, texts, strict=True)]
        keys = [hashlib.blake2b(row, digest_size=KEY_BYTES).digest() for row in rows]
        return pl.Series(TICKET_KEY, keys, dtype=pl.Binary)


def load_ticket_tokenizer(path: Path, prompt: Prompt, *, max_ticket_tokens: int, truncate: str) -> TicketTokenizer:
    """The tokenizer of a saved ``tokenizer.json``, special tokens disabled, with neither cutting nor padding."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return TicketTokenizer(tokenizer, prompt, max_ticket_tokens, truncate)


def tokenize_frame(frame: pl.DataFrame, tokenizer: TicketTokenizer, *, keep_text: bool = False) -> pl.DataFrame:
    """Tickets with key, length columns and ids, and the reason of those that do not fit.

    Args:
        frame: Columns id, ``input_index`` and ``text``.
        tokenizer: Of the run's model and prompt.
        keep_text: A head reads the text too: it stays, and counts in the key (of a cut ticket all of it).
    """
    words = frame[TEXT].to_list()
    texts = tokenizer.encode(words)
    return (frame if keep_text else frame.drop(TEXT)).with_columns(
        texts.keys_series(words if keep_text else None),
        pl.Series(TOKEN_LENGTH, texts.lengths, dtype=pl.UInt32),
        pl.Series(IS_TRUNCATED, texts.truncated),
        texts.ids_series(),
        pl.when(pl.Series(texts.fits_prompt).not_())
        .then(pl.lit(REASON_PROMPT_BOUNDARY))
        .when(pl.Series(texts.lengths == 0))
        .then(pl.lit(REASON_NO_TEXT))
        .alias(REASON),
    )


def tokenize_tickets(
    tickets: Path, tokens: Path, rejected: Path, tokenizer: TicketTokenizer, *, keep_text: bool = False
) -> TokenizeSummary:
    """Write the tokens of a table of tickets, and apart from them the tickets that do not fit the prompt.

    Args:
        tickets: Parquet with id, ``input_index`` and ``text``.
        tokens: Where the table with ``ticket_key, token_length, is_truncated, token_ids`` goes.
        rejected: Where id, ``input_index`` and ``reason`` of the others go.
        tokenizer: Of the run's model and prompt.
        keep_text: See `tokenize_frame`.
    """
    lengths: list[np.ndarray] = []
    truncated = 0
    left_out: list[pl.DataFrame] = []
    with _ParquetSink(tokens) as sink:
        for made in _two_at_once(partial(tokenize_frame, tokenizer=tokenizer, keep_text=keep_text), _chunks(tickets)):
            kept = made.filter(pl.col(REASON).is_null()).drop(REASON)
            id_and_reason = [column for column in made.columns if column in (made.columns[0], INPUT_INDEX, REASON)]
            left_out.append(made.filter(pl.col(REASON).is_not_null()).select(id_and_reason))
            sink.write(kept)
            lengths.append(kept[TOKEN_LENGTH].to_numpy())
            truncated += int(kept[IS_TRUNCATED].sum())
    rejects = pl.concat(left_out)
    rejects.write_parquet(rejected)
    joined = np.concatenate(lengths)
    if not len(joined):
        return TokenizeSummary(0, 0, len(rejects), 0, 0.0, 0.0, 0)
    return TokenizeSummary(
        tickets=len(joined),
        truncated=truncated,
        rejected=len(rejects),
        shortest=int(joined.min()),
        median=float(np.median(joined)),
        mean=float(joined.mean()),
        longest=int(joined.max()),
    )


def _chunks(path: Path) -> Iterable[pl.DataFrame]:
    """Frames of at most `CHUNK_ROWS` rows in file order; one empty frame if the table is empty."""
    file = pq.ParquetFile(path)
    if file.metadata.num_rows == 0:
        yield pl.read_parquet(path, glob=False)
    for batch in file.iter_batches(CHUNK_ROWS):
        yield pl.from_arrow(batch)


def _two_at_once(function: Callable[[pl.DataFrame], pl.DataFrame], frames: Iterable[pl.DataFrame]):
    """``map`` in order, the next frame worked on while one is used: the tokenizer runs outside Python's lock."""
    pending: deque[Future] = deque()
    with ThreadPoolExecutor(2) as pool:
        for frame in frames:
            pending.append(pool.submit(function, frame))
            if len(pending) == 2:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


class _ParquetSink:
    """One Parquet file written frame by frame."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> "_ParquetSink":
        return self

    def write(self, frame: pl.DataFrame) -> None:
        table = frame.to_arrow()
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, table.schema, compression="zstd")
        self._writer.write_table(table)

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()
