"""The honest rivals of a head, which need no language model. scikit-learn; only where labels are measured."""

import warnings
from collections.abc import Callable, Sequence

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import MultinomialNB
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline

from ticket_engine.errors import InputError
from ticket_engine.head_fitting import stratified_folds

TFIDF_STRENGTHS = (10.0, 100.0)
FOLDS = 5
WORD = r"(?u)\b\w+\b"


def naive_bayes() -> Pipeline:
    """Multinomial naive Bayes on words and word pairs."""
    return make_pipeline(CountVectorizer(ngram_range=(1, 2), token_pattern=WORD), MultinomialNB(alpha=0.1))


def tfidf_regression(strength: float = TFIDF_STRENGTHS[0]) -> Pipeline:
    """Logistic regression on TF-IDF of words, word pairs and character 2- to 5-grams."""
    features = FeatureUnion(
        [
            ("words", TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=WORD)),
            ("characters", TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True)),
        ]
    )
    return make_pipeline(features, LogisticRegression(C=strength, max_iter=300, tol=1e-3))


BASELINES: dict[str, Callable[[], Pipeline]] = {"naive Bayes": naive_bayes, "TF-IDF regression": tfidf_regression}


def baseline_answers(texts: Sequence[str], label_names: np.ndarray, seed: int = 0) -> dict[str, np.ndarray]:
    """Labels that each rival gives to tickets it was not trained on, trained on the other four fifths of them.

    Args:
        texts: Of the tickets.
        label_names: Their true labels.
        seed: Of the folds.

    Returns:
        Label names a rival, ``(tickets,)``; the largest class of the other four fifths among them.

    Raises:
        InputError: Fewer than ten tickets.
    """
    if len(texts) < 10:
        raise InputError(f"Baselines need at least 10 tickets with labels, found {len(texts)}.")
    _, indices = np.unique(label_names, return_inverse=True)
    fold_of = stratified_folds(indices, FOLDS, np.random.default_rng(seed))
    answers = {name: np.empty(len(texts), dtype=object) for name in ("largest class", *BASELINES)}
    for fold in range(FOLDS):
        inside, outside = np.flatnonzero(fold_of == fold), np.flatnonzero(fold_of != fold)
        names, counts = np.unique(label_names[outside], return_counts=True)
        answers["largest class"][inside] = names[counts.argmax()]
        for name, make in BASELINES.items():
            given = train_and_answer(
                make(), [texts[row] for row in outside], label_names[outside], [texts[row] for row in inside]
            )
            answers[name][inside] = given
    return answers


def train_and_answer(
    model: Pipeline, texts: Sequence[str], label_names: np.ndarray, asked: Sequence[str]
) -> np.ndarray:
    """Labels that a model trained on some tickets gives to others; the only label there is, if there is one."""
    if len(np.unique(label_names)) == 1:
        return np.repeat(label_names[:1], len(asked))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(texts, label_names).predict(asked)
