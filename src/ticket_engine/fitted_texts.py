"""Texts told apart without being kept: short hashes that do not mind white space and capitals."""

import hashlib
from collections.abc import Sequence

import numpy as np


def same_text(text: str) -> str:
    """What two texts have in common that are one for people: no case, one blank for white space."""
    return " ".join(text.split()).casefold()


def hash_texts(texts: Sequence[str]) -> np.ndarray:
    """A number a text, uint64 ``(texts,)``."""
    digests = [hashlib.blake2b(same_text(text).encode(), digest_size=8).digest() for text in texts]
    return np.frombuffer(b"".join(digests), dtype="<u8")
