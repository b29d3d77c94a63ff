"""Lexical features: what counts as an n-gram, and that rows depend on nothing but their own text."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ticket_engine import lexical
from ticket_engine.lexical import count_ngrams, fit_lexicon, lexical_features

TEXTS = ["My card was declined", "my CARD  arrived\nlate", "Überweisung fehlt", "注文がまだ届きません。", "x", "?!"]


def naive_characters(text: str) -> Counter:
    """The oracle: character 2- to 5-grams of each word with a blank at both ends, blanks never inside."""
    grams: Counter = Counter()
    for word in text.casefold().split():
        padded = f" {word} "
        for length in (2, 3, 4, 5):
            for start in range(len(padded) - length + 1):
                grams[padded[start : start + length]] += 1
    return grams


def naive_words(text: str) -> Counter:
    """The oracle: runs of letters, digits and underscores, and neighbouring pairs of them."""
    words, word = [], ""
    for character in f"{' '.join(text.casefold().split())} ":
        if character.isalnum() or character == "_":
            word += character
        elif word:
            words.append(word)
            word = ""
    return Counter(words) + Counter(pairwise(words))


@given(st.text(max_size=60))
@settings(deadline=None, max_examples=60)
def test_counts_equal_those_of_a_slow_count_of_every_ngram(text: str) -> None:
    words, characters = count_ngrams([text])
    for counts, oracle in ((words, naive_words(text)), (characters, naive_characters(text))):
        assert sorted(counts.data.tolist()) == sorted(oracle.values())  # 2**20 bins: no collision in so few


def test_case_white_space_and_line_breaks_do_not_matter() -> None:
    first, second = count_ngrams(["My card\n was  declined ", "my CARD was declined"])[0]
    assert (first != second).nnz == 0


def test_equal_words_share_a_bin_wherever_they_stand() -> None:
    words, _ = count_ngrams(["card", "please, my card"])
    assert set(words[[0]].indices) <= set(words[[1]].indices)


def test_a_word_pair_does_not_reach_into_the_next_ticket() -> None:
    together, apart = count_ngrams(["card lost"])[0], count_ngrams(["card", "lost"])[0]
    assert together.sum() == 3
    assert apart.sum() == 2


def test_a_row_is_the_same_alone_and_among_others_and_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    lexicon = fit_lexicon(TEXTS)
    together = lexical_features(TEXTS, lexicon).toarray()
    alone = np.concatenate([lexical_features([text], lexicon).toarray() for text in TEXTS])
    monkeypatch.setattr(lexical, "CHUNK_CHARACTERS", 30)
    chunked = lexical_features(TEXTS, lexicon).toarray()
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(together, chunked)


def test_rows_have_length_one_or_less_where_a_block_is_empty() -> None:
    lengths = np.linalg.norm(lexical_features(TEXTS, fit_lexicon(TEXTS)).toarray(), axis=1)
    np.testing.assert_allclose(lengths[:5], 1, atol=1e-6)
    assert lengths[5] == pytest.approx(np.sqrt(0.5), abs=1e-6)  # "?!" has no word


def test_unknown_ngrams_are_left_out() -> None:
    lexicon = fit_lexicon(["card"])
    assert lexical_features(["zebra"], lexicon).nnz == 0
    assert lexical_features(["card zebra"], lexicon).shape == (1, lexicon.columns)


def test_rare_ngrams_weigh_more_than_common_ones() -> None:
    lexicon = fit_lexicon(["card lost", "card stolen", "card broken"])
    common = np.searchsorted(lexicon.word_bins, count_ngrams(["card"])[0].indices)
    rare = np.searchsorted(lexicon.word_bins, count_ngrams(["lost"])[0].indices)
    assert lexicon.word_idf[common] == pytest.approx(1.0)
    assert lexicon.word_idf[rare] == pytest.approx(1 + np.log(2), abs=1e-6)


def test_no_texts_give_no_rows() -> None:
    assert lexical_features([], fit_lexicon(["card"])).shape[0] == 0
