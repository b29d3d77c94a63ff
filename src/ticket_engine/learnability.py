"""Whether texts say anything about their labels at all: a permutation test before a head is shipped."""

from collections.abc import Sequence

import numpy as np

from ticket_engine.head_designs import Design
from ticket_engine.heads import Block
from ticket_engine.ridge import decompose, fit_ridge

PERMUTATIONS = 199
PERMUTATION_ROWS = 500
CHANCE = 0.01


def chance_of_random_labels(design: Design, blocks: Sequence[Block], seed: int) -> float:
    """Share of random orders of the labels that texts predict as well as the true order (permutation test)."""
    rng = np.random.default_rng(seed)
    tickets = int(design.counted.sum())
    rows = np.sort(rng.permutation(tickets)[:PERMUTATION_ROWS])
    rows = np.concatenate([rows, np.arange(tickets, len(design.counted))])
    shares = {None: 0.5 if blocks else 1.0, **{block: 0.5 / len(blocks) for block in blocks}}
    made, counted = decompose(design.kernel(shares, rows), design.row_weights[rows]), design.counted[rows]
    targets = design.targets[rows]

    def error(of: np.ndarray) -> float:
        return fit_ridge(made, of, judge=lambda left_out: float(((left_out - of)[counted] ** 2).sum(1).mean())).error

    true = error(targets)
    as_good = 0
    for _ in range(PERMUTATIONS):
        shuffled = targets.copy()
        shuffled[counted] = targets[counted][rng.permutation(int(counted.sum()))]
        as_good += error(shuffled) <= true
    return (1 + as_good) / (1 + PERMUTATIONS)


def unlearnable_words(label_indices: np.ndarray, labels: Sequence[str], accuracy: float) -> str:
    """Why there is no head, in two plain sentences."""
    counts = np.bincount(label_indices, minlength=len(labels))
    most = counts.max() / counts.sum()
    return (
        f"Nothing can be learnt from these {len(label_indices)} labels: held-out accuracy is {accuracy:.2f}, always answering "
        f"{labels[int(counts.argmax())]} gives {most:.2f}, and labels in random order fit the texts as well. "
        "Check the label column, or give more rows; --unproven fits all the same."
    )
