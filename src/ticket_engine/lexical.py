"""Lexical features of ticket texts: hashed TF-IDF of words, word pairs and character n-grams.

No model and no vocabulary: an n-gram is a number. A `Lexicon` keeps, of the tickets that a head was
fitted on, which hash bins occur and how rare each is; the texts themselves are not kept. Two blocks,
each of length 1, so that short and long tickets weigh the same::

    block 0   words and pairs of neighbouring words
    block 1   character 2- to 5-grams inside words, blanks at both ends included

All of it runs over one array of code points a chunk, without a Python loop over n-grams.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import sparse

BINS_LOG2 = 20
CHARACTER_LENGTHS = (2, 3, 4, 5)
CHUNK_CHARACTERS = 400_000
_BLANK = 32
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so it has an inverse modulo 2**64
_BASE_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 2**64))
_PAIR = np.uint64(0xC2B2AE3D27D4EB4F)
_FINISH = np.uint64(0xFF51AFD7ED558CCD)


@dataclass(frozen=True, slots=True)
class Lexicon:
    """Hash bins that occur in the fitting tickets, and their rarity.

    Attributes:
        word_bins: Sorted bins of block 0, int32.
        word_idf: ``log((1 + tickets) / (1 + tickets with the bin)) + 1``, float32, one a bin.
        character_bins: Like ``word_bins`` for block 1.
        character_idf: Like ``word_idf`` for block 1.
    """

    word_bins: np.ndarray
    word_idf: np.ndarray
    character_bins: np.ndarray
    character_idf: np.ndarray

    @property
    def columns(self) -> int:
        """Width of the feature matrix."""
        return len(self.word_bins) + len(self.character_bins)


def fit_lexicon(texts: Sequence[str]) -> Lexicon:
    """The lexicon of some ticket texts."""
    blocks = [_bins_and_idf(counts) for counts in count_ngrams(texts)]
    (word_bins, word_idf), (character_bins, character_idf) = blocks
    return Lexicon(word_bins, word_idf, character_bins, character_idf)


def lexical_features(texts: Sequence[str], lexicon: Lexicon) -> sparse.csr_array:
    """TF-IDF rows of ticket texts, float32 ``(texts, lexicon.columns)``.

    ``value = (1 + log count) * idf``, each block scaled to length ``sqrt(1/2)``, so a row has length 1
    (less where a block is empty). N-grams that the lexicon does not know are left out.
    """
    words, characters = count_ngrams(texts)
    blocks = [
        _weighted(words, lexicon.word_bins, lexicon.word_idf),
        _weighted(characters, lexicon.character_bins, lexicon.character_idf),
    ]
    return sparse.csr_array(sparse.hstack(blocks, format="csr"))


def count_ngrams(texts: Sequence[str]) -> tuple[sparse.csr_array, sparse.csr_array]:
    """How often each bin occurs in each text: block 0 and block 1, float32 ``(texts, 2**BINS_LOG2)``."""
    parts = [_count_chunk(chunk) for chunk in _chunks(texts)]
    if not parts:
        empty = sparse.csr_array((0, 2**BINS_LOG2), dtype=np.float32)
        return empty, empty
    return tuple(sparse.csr_array(sparse.vstack(blocks, format="csr")) for blocks in zip(*parts, strict=True))


def _chunks(texts: Sequence[str]) -> list[list[str]]:
    """Normal forms (case folded, single blanks, a blank at both ends) in lists of bounded size."""
    chunks: list[list[str]] = []
    room = 0
    for text in texts:
        normal = f" {' '.join(text.casefold().split())} "
        if not chunks or room < len(normal):
            chunks.append([])
            room = CHUNK_CHARACTERS
        chunks[-1].append(normal)
        room -= len(normal)
    return chunks


def _count_chunk(texts: list[str]) -> tuple[sparse.csr_array, sparse.csr_array]:
    codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    rows = np.repeat(np.arange(len(texts), dtype=np.int32), [len(text) for text in texts])
    return _matrix(*_word_hashes(codes, rows), len(texts)), _matrix(*_character_hashes(codes, rows), len(texts))


def _character_hashes(codes: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hash and row of every character n-gram that does not reach over a blank.

    The text of a row starts and ends with a blank, so no n-gram reaches into the next row either: it
    would hold two neighbouring blanks, one of them inside or both of them alone.
    """
    is_blank = codes == _BLANK
    values = codes.astype(np.uint64)
    rolling = values
    hashes, places = [], []
    inside = np.zeros(len(codes), dtype=bool)  # a blank strictly inside the window that starts here
    for length in range(2, max(CHARACTER_LENGTHS) + 1):
        count = len(codes) - length + 1
        if count <= 0:
            break
        rolling = rolling[:count] * _BASE + values[length - 1 :]
        if length > 2:
            inside = inside[:count] | is_blank[length - 2 : length - 2 + count]
        keep = ~inside[:count] if length > 2 else ~(is_blank[:-1] & is_blank[1:])
        if length in CHARACTER_LENGTHS:
            hashes.append(rolling[keep] + np.uint64(length))
            places.append(np.flatnonzero(keep))
    if not hashes:
        return np.zeros(0, np.uint64), np.zeros(0, np.int32)
    return np.concatenate(hashes), rows[np.concatenate(places)]


def _word_hashes(codes: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hash and row of every word (a run of letters, digits and underscores) and of every pair of neighbours.

    A word's hash is ``sum over i of code[i] * BASE**(i - start)``, read off one cumulative sum.
    """
    is_word = np.concatenate([[False], _word_characters()[codes], [False]])
    change = np.flatnonzero(is_word[1:] != is_word[:-1])
    starts, ends = change[0::2], change[1::2]
    powers = np.cumprod(np.concatenate([[np.uint64(1)], np.full(len(codes), _BASE)]), dtype=np.uint64)
    inverse = np.cumprod(np.concatenate([[np.uint64(1)], np.full(len(codes), _BASE_INVERSE)]), dtype=np.uint64)
    sums = np.concatenate([[np.uint64(0)], np.cumsum((codes + np.uint64(1)) * powers[:-1], dtype=np.uint64)])
    words = (sums[ends] - sums[starts]) * inverse[starts]
    owners = rows[starts]
    together = owners[1:] == owners[:-1]
    pairs = (words[:-1] * _PAIR + words[1:])[together] + np.uint64(1)
    return np.concatenate([words, pairs]), np.concatenate([owners, owners[1:][together]])


@cache
def _word_characters() -> np.ndarray:
    """bool a code point: letter, digit or underscore."""
    return np.array([chr(code).isalnum() or code == ord("_") for code in range(0x110000)])


def _matrix(hashes: np.ndarray, rows: np.ndarray, count: int) -> sparse.csr_array:
    """Counts of bins; the highest bits of a multiplied hash name the bin."""
    mixed = (hashes ^ (hashes >> np.uint64(29))) * _FINISH
    bins = (mixed >> np.uint64(64 - BINS_LOG2)).astype(np.int32)
    ones = np.ones(len(bins), dtype=np.float32)
    made = sparse.coo_array((ones, (rows, bins)), shape=(count, 2**BINS_LOG2)).tocsr()
    made.sum_duplicates()
    return made


def _bins_and_idf(counts: sparse.csr_array) -> tuple[np.ndarray, np.ndarray]:
    bins, tickets = np.unique(counts.indices, return_counts=True)
    idf = np.log((1 + counts.shape[0]) / (1 + tickets)) + 1
    return bins.astype(np.int32), idf.astype(np.float32)


def _weighted(counts: sparse.csr_array, bins: np.ndarray, idf: np.ndarray) -> sparse.csr_array:
    """Known columns only, weighted, rows of length ``sqrt(1/2)``."""
    place = np.full(2**BINS_LOG2, -1, dtype=np.int32)
    place[bins] = np.arange(len(bins), dtype=np.int32)
    columns = place[counts.indices]
    known = columns >= 0
    rows = np.repeat(np.arange(counts.shape[0]), np.diff(counts.indptr))[known]
    columns = columns[known]
    values = (1 + np.log(counts.data[known])) * idf[columns]
    lengths = np.sqrt(2 * np.bincount(rows, weights=values * values, minlength=counts.shape[0]))
    values = (values / lengths[rows]).astype(np.float32)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=counts.shape[0]))])
    return sparse.csr_array((values, columns, indptr), shape=(counts.shape[0], len(bins)))
