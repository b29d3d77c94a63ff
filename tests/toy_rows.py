"""Toy tickets for fitting heads: texts that sometimes name their label, and made-up hidden states."""

import numpy as np

from ticket_engine.head_designs import FittingRows
from ticket_engine.heads import LAST, MEAN, Block, HeadIdentity

LABELS = ("billing", "delivery", "account")
LAYERS = 10
IDENTITY = HeadIdentity("model", "prompt", "labels", "rows")
WORDS = {"billing": "invoice charged refund", "delivery": "parcel courier late", "account": "login password locked"}


def make_rows(count: int, seed: int, *, clear: float = 0.6, sizes: int = 12) -> FittingRows:
    """Tickets whose text names the label in ``clear`` of all cases, and whose deep hidden states always do."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, len(LABELS), count)
    texts = []
    for index in truth:
        words = WORDS[LABELS[index]].split() if rng.random() < clear else ["hello", "please", "help"]
        texts.append(f"{rng.choice(words)} {rng.choice(words)} number {rng.integers(1000)}")
    hidden = {}
    for depth, strength in ((1, 0.0), (2, 0.5), (4, 1.0), (8, 2.0), (10, 3.0)):
        values = rng.normal(size=(count, sizes)) + 5
        values[np.arange(count), truth] += strength
        hidden[Block(depth, MEAN)] = values.astype(np.float32)
        hidden[Block(depth, LAST)] = values.astype(np.float32)
    return FittingRows(texts, truth, hidden)


def make_label_rows() -> FittingRows:
    rows = make_rows(len(LABELS), 99)
    return FittingRows([f"{label}: {WORDS[label]}" for label in LABELS], np.arange(len(LABELS)), rows.hidden)
