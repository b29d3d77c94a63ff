"""One packed pass over labelled tickets and label descriptions that collects what heads are fitted on."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import polars as pl

from ticket_engine.engine import Engine, load_engine
from ticket_engine.engine_spec import TOKENIZER_FILE
from ticket_engine.errors import ScoringError
from ticket_engine.head_designs import FittingRows
from ticket_engine.heads import LAST, MEAN, Block
from ticket_engine.labelled import GOLD_FILE, LABEL_INDEX, hash_rows
from ticket_engine.labels import Label
from ticket_engine.schemas import INPUT_INDEX, TEXT, TICKET_KEY, TOKEN_IDS
from ticket_engine.tokenization import load_ticket_tokenizer

FEATURES_FILE: Final = "features.npz"
ROWS_FILE: Final = "fitting_rows.parquet"


def choose_rows(folder: Path, most: int, seed: int) -> pl.DataFrame:
    """Tickets to fit on: input_index, text, ticket_key, token_ids, label_index (-1: none), one a text and label.

    Equal texts with the same label count once, so that a copy cannot answer for its twin on held-out
    rows; a text without label is left out where it has one elsewhere. Labelled ones come first.

    Args:
        folder: Working folder with tickets, tokens and gold labels.
        most: Rows at most, labelled and not, each; more are drawn by chance.
        seed: Of that draw.
    """
    tickets = pl.read_parquet(folder / "tickets.parquet", columns=[INPUT_INDEX, TEXT])
    tokens = pl.read_parquet(folder / "tokens.parquet", columns=[INPUT_INDEX, TICKET_KEY, TOKEN_IDS])
    gold = pl.read_parquet(folder / GOLD_FILE)
    rows = tokens.join(tickets, on=INPUT_INDEX, how="left", validate="1:1").join(
        gold, on=INPUT_INDEX, how="left", validate="1:1", maintain_order="left"
    )
    labelled = rows.drop_nulls(LABEL_INDEX).unique([TICKET_KEY, LABEL_INDEX], keep="first", maintain_order=True)
    others = rows.filter(pl.col(LABEL_INDEX).is_null()).unique(TICKET_KEY, keep="first", maintain_order=True)
    others = others.join(labelled.select(TICKET_KEY), on=TICKET_KEY, how="anti", maintain_order="left")
    parts = [part if len(part) <= most else part.sample(most, seed=seed) for part in (labelled, others)]
    return pl.concat(parts).with_columns(pl.col(LABEL_INDEX).fill_null(-1))


def collect_fitting_rows(folder: Path, labels: Sequence[Label], depths: tuple[int, ...], rows: pl.DataFrame) -> str:
    """Write hidden states of tickets and label rows to the folder; the hash of the labelled rows.

    Args:
        folder: Working folder with the engine's spec.
        labels: In order; each gives label rows, see `label_texts`.
        depths: Layers after which to pool; may be empty, then no model is loaded.
        rows: From `choose_rows`.
    """
    texts, _ = label_texts(labels)
    hidden: dict[str, np.ndarray] = {}
    if depths:
        engine = load_engine(folder)
        engine.check_features(depths)
        tokenizer = load_ticket_tokenizer(
            folder / TOKENIZER_FILE,
            engine.spec.prompt,
            max_ticket_tokens=engine.spec.max_ticket_tokens,
            truncate=engine.spec.truncate,
        )
        ids = [*(row.to_numpy() for row in rows[TOKEN_IDS]), *_split_ids(tokenizer.encode(texts))]
        hidden = {block.key: values for block, values in hidden_of(engine, ids, depths).items()}
    np.savez(folder / FEATURES_FILE, **hidden)
    rows.drop(TOKEN_IDS).write_parquet(folder / ROWS_FILE)
    labelled = rows.filter(pl.col(LABEL_INDEX) >= 0)
    return hash_rows(labelled[TICKET_KEY], labelled[LABEL_INDEX])


def read_fitting_rows(folder: Path, labels: Sequence[Label]) -> tuple[FittingRows, FittingRows]:
    """Tickets and label rows as `collect_fitting_rows` left them."""
    rows = pl.read_parquet(folder / ROWS_FILE)
    with np.load(folder / FEATURES_FILE) as stored:
        hidden = {_block(key): stored[key] for key in stored.files}
    count = len(rows)
    tickets = FittingRows(
        rows[TEXT].to_list(),
        rows[LABEL_INDEX].to_numpy().astype(np.int64),
        {block: values[:count] for block, values in hidden.items()},
    )
    label_rows = FittingRows(*label_texts(labels), {block: values[count:] for block, values in hidden.items()})
    return tickets, label_rows


def count_layers(model_folder: Path) -> int:
    """Layers of a model."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model_folder, local_files_only=True).get_text_config().num_hidden_layers


def label_texts(labels: Sequence[Label]) -> tuple[list[str], np.ndarray]:
    """Texts that stand in for tickets of a label, and the label's index of each: name and meaning, name, meaning, examples.

    The three together were best without any labelled ticket (mean over seven sets 0.56, the first alone 0.48).
    """
    texts, indices = [], []
    for index, label in enumerate(labels):
        described = [f"{label.text}: {label.description}", label.text, label.description]
        made = [*(described if label.description else [label.text]), *label.examples]
        texts += made
        indices += [index] * len(made)
    return texts, np.array(indices, dtype=np.int64)


def hidden_of(engine: Engine, ids: Sequence[np.ndarray], depths: tuple[int, ...]) -> dict[Block, np.ndarray]:
    """Pooled hidden states of tickets, float32 ``(tickets, hidden)`` a block, rows in the order given.

    Args:
        engine: With packed execution.
        ids: Token ids of each ticket, without prompt.
        depths: Growing numbers of layers.

    Raises:
        ScoringError: A value is not finite.
    """
    made: dict[Block, np.ndarray] = {}
    lengths = np.array([len(row) for row in ids])
    for batch in _batches(lengths, engine.spec.extra_tokens, engine.spec.token_budget):
        features = engine.features([ids[row] for row in batch], depths)
        for depth, pooled in zip(depths, features, strict=True):
            for block, values in ((Block(depth, MEAN), pooled.mean), (Block(depth, LAST), pooled.last)):
                if block not in made:
                    made[block] = np.empty((len(ids), values.shape[1]), dtype=np.float32)
                made[block][batch] = values
    for block, values in made.items():
        bad = int((~np.isfinite(values)).any(1).sum())
        if bad:
            raise ScoringError(f"{bad} of {len(ids)} tickets have hidden states that are not finite ({block.key}).")
    return made


def _batches(lengths: np.ndarray, extra: int, budget: int) -> Iterator[np.ndarray]:
    """Row numbers, longest first, as many as fit the token budget, at least one."""
    order = np.argsort(-lengths, kind="stable")
    start, used = 0, 0
    for place, row in enumerate(order):
        if place > start and used + lengths[row] + extra > budget:
            yield order[start:place]
            start, used = place, 0
        used += lengths[row] + extra
    if start < len(order):
        yield order[start:]


def _split_ids(texts) -> list[np.ndarray]:
    return np.split(texts.flat, np.cumsum(texts.lengths)[:-1])


def _block(key: str) -> Block:
    pooling, depth = key.rsplit("_", 1)
    return Block(int(depth), pooling)
