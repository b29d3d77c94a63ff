"""What a head is fitted on: labelled tickets, label descriptions, and the fit of one depth.

Label names and descriptions are rows like tickets. They stand in for labels that few or no tickets
show: measured over nine sets, mean accuracy with 20 labelled tickets rose from 0.42 to 0.55, with 100
from 0.69 to 0.72 (docs/log.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import sparse

from ticket_engine.calibration import best_log_loss
from ticket_engine.fitted_texts import same_text
from ticket_engine.heads import LAST, MEAN, Block, Scaling, Stage, fit_scaling, scaled
from ticket_engine.lexical import Lexicon, fit_lexicon, lexical_features
from ticket_engine.ridge import ROWS_OF_A_STRENGTH, RidgeFit, decompose, fit_ridge, one_hot

DEPTH_SHARES = (0.1, 0.2, 0.4, 0.8, 1.0)
HIDDEN_SHARES = (0.3, 0.5, 0.7)
FEW_ROWS = 50  # below, left-out error is too noisy to choose by, and these two stand
FEW_HIDDEN_SHARE, FEW_STRENGTH = 0.9, 0.3
LABEL_ROW_WEIGHT = 10.0  # errors on label rows count so much: with 10 to 50 tickets +0.01 to +0.03, later nothing
SELECTION_ROWS = 800  # shares of lexical and hidden kernels are chosen on so many rows; strengths on all
NEVER = 2.0


@dataclass(frozen=True, slots=True)
class FittingRows:
    """Texts with what the forward pass gave for them.

    Attributes:
        texts: As the model read them, joined text columns.
        label_indices: int64 ``(rows,)``; -1 for a ticket without a label.
        hidden: float32 ``(rows, hidden)`` a block.
    """

    texts: Sequence[str]
    label_indices: np.ndarray
    hidden: Mapping[Block, np.ndarray]

    def take(self, rows: np.ndarray) -> "FittingRows":
        """Some of the rows, in the order given."""
        hidden = {block: values[rows] for block, values in self.hidden.items()}
        return FittingRows([self.texts[row] for row in rows], self.label_indices[rows], hidden)

    def keep(self, blocks: Sequence[Block]) -> "FittingRows":
        """All rows with these blocks only."""
        return FittingRows(self.texts, self.label_indices, {block: self.hidden[block] for block in blocks})


def without_texts(rows: FittingRows, texts: Sequence[str]) -> FittingRows:
    """The rows whose text is none of some others: an example of the labels file may be a held-out ticket."""
    taken = set(map(same_text, texts))
    return rows.take(np.array([row for row, text in enumerate(rows.texts) if same_text(text) not in taken], dtype=int))


@dataclass(frozen=True, slots=True)
class Design:
    """Features and kernels of a fitting set: its tickets first, then the label rows.

    Attributes:
        lexicon: Of both.
        scalings: Of the tickets alone, one a block.
        lexical: ``(rows, columns)``.
        lexical_kernel: ``lexical @ lexical.T``, float32.
        hidden: Scaled, ``(rows, hidden)`` a block.
        targets: One-hot, ``(rows, labels)``.
        counted: True for tickets; choices rest on their left-out error.
        row_weights: How much each row's error counts.
    """

    lexicon: Lexicon
    scalings: Mapping[Block, Scaling]
    lexical: sparse.csr_array
    lexical_kernel: np.ndarray
    hidden: Mapping[Block, np.ndarray]
    targets: np.ndarray
    counted: np.ndarray
    row_weights: np.ndarray

    def kernel(self, shares: Mapping[Block | None, float], rows: np.ndarray | None = None) -> np.ndarray:
        """``sum over blocks of share * features @ features.T``; the key None is the lexical block."""
        rows = np.arange(len(self.targets)) if rows is None else rows
        total = np.zeros((len(rows), len(rows)))
        for block, share in shares.items():
            if block is None:
                total += share * self.lexical_kernel[np.ix_(rows, rows)]
            else:
                part = self.hidden[block][rows]
                total += share * (part @ part.T)
        return total


def candidate_depths(layers: int) -> tuple[int, ...]:
    """Depths that are tried: a tenth, a fifth, two and four fifths, and all of the layers."""
    return tuple(sorted({max(1, round(layers * share)) for share in DEPTH_SHARES}))


def blocks_of_depth(depth: int, depths: Sequence[int], layers: int) -> tuple[Block, ...]:
    """Blocks that a stage of this depth reads: means at all candidate depths down to it.

    The last position says something only after the last layer, where the model is about to answer.
    """
    blocks = [Block(other, MEAN) for other in sorted({*depths, depth} - {0}) if other <= depth]
    return tuple(blocks + ([Block(layers, LAST)] if depth == layers else []))


def make_design(tickets: FittingRows, label_rows: FittingRows, labels: int, background: FittingRows) -> Design:
    """Features of labelled tickets and label rows.

    Args:
        tickets: Labelled ones.
        label_rows: Descriptions and examples.
        labels: How many labels there are.
        background: Tickets without labels that make the scaling surer; may be empty.
    """
    texts = [*tickets.texts, *label_rows.texts]
    lexicon = fit_lexicon(texts)
    scalings, hidden = {}, {}
    for block, values in tickets.hidden.items():
        scalings[block] = fit_scaling(np.concatenate([values, background.hidden[block]]))
        hidden[block] = scaled(np.concatenate([values, label_rows.hidden[block]]), scalings[block])
    indices = np.concatenate([tickets.label_indices, label_rows.label_indices])
    counted = np.arange(len(indices)) < len(tickets.label_indices)
    lexical = lexical_features(texts, lexicon)
    kernel = (lexical @ lexical.T).toarray()
    weights = np.where(counted, 1.0, LABEL_ROW_WEIGHT)
    return Design(lexicon, scalings, lexical, kernel, hidden, one_hot(indices, labels), counted, weights)


def fit_stage(design: Design, depth: int, blocks: Sequence[Block], seed: int) -> tuple[Stage, RidgeFit]:
    """The stage of one depth: how much the hidden states count, and how strong the ridge, by left-out log loss.

    Squared error shrinks too much where labels are many (77 labels, 1,140 tickets: accuracy 0.765, by log
    loss 0.785). With fewer than `FEW_ROWS` tickets both are fixed. The temperature is 1 and the threshold never: they need answers that the fit did not see.
    """
    rows = _selection_rows(design, seed)
    best, best_shares = None, None
    candidates = (FEW_HIDDEN_SHARE,) if design.counted.sum() < FEW_ROWS else HIDDEN_SHARES
    for hidden_share in candidates if blocks else (0.0,):
        shares = {None: 1 - hidden_share, **{block: hidden_share / len(blocks) for block in blocks}}
        fit = _fit(design, shares, rows)
        if best is None or fit.error < best.error:
            best, best_shares = fit, shares
    fit = best if rows is None else _fit(design, best_shares, None)
    weights = {block: best_shares[block] * (design.hidden[block].T @ fit.alpha) for block in blocks}
    stage = Stage(
        depth=depth,
        lexical_weights=(best_shares[None] * (design.lexical.T @ fit.alpha)).astype(np.float32),
        hidden_weights={block: values.astype(np.float32) for block, values in weights.items()},
        bias=fit.bias.astype(np.float32),
        temperature=1.0,
        threshold=NEVER,
    )
    return stage, fit


def raw_scores(stage: Stage, design: Design, rows: FittingRows) -> np.ndarray:
    """A stage's scores before temperature, of rows that it was not fitted on, ``(rows, labels)``."""
    scores = lexical_features(rows.texts, design.lexicon) @ stage.lexical_weights + stage.bias
    for block, weights in stage.hidden_weights.items():
        scores = scores + scaled(rows.hidden[block], design.scalings[block]) @ weights
    return scores.astype(np.float64)


def _fit(design: Design, shares: Mapping[Block | None, float], rows: np.ndarray | None) -> RidgeFit:
    picked = np.arange(len(design.targets)) if rows is None else rows
    made = decompose(design.kernel(shares, rows), design.row_weights[picked])
    if design.counted.sum() < FEW_ROWS:
        return fit_ridge(made, design.targets, strengths=(FEW_STRENGTH * ROWS_OF_A_STRENGTH / len(picked),))
    counted = design.counted[picked]
    truth = design.targets[picked][counted].argmax(1)
    return fit_ridge(made, design.targets[picked], judge=lambda left_out: best_log_loss(left_out[counted], truth))


def _selection_rows(design: Design, seed: int) -> np.ndarray | None:
    tickets = int(design.counted.sum())
    if tickets <= SELECTION_ROWS:
        return None
    chosen = np.random.default_rng(seed).choice(tickets, SELECTION_ROWS, replace=False)
    return np.concatenate([np.sort(chosen), np.arange(tickets, len(design.counted))])
