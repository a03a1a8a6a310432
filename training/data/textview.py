"""A text with what several rules need of it, computed once: lines, words, hashes of words and of word n-grams."""

from __future__ import annotations

import zlib
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, from the golden ratio: spreads consecutive values over 64 bits
_MASK = (1 << 64) - 1


class NGramGroups(NamedTuple):
    """Word n-grams that occur more than once: their places, equal ones together and in order of place.

    `repeat` is false at the first occurrence of each.
    """

    places: Int64Array
    repeat: npt.NDArray[np.bool_]


class TextView:
    """A document's text and its parts."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def lines(self) -> list[str]:
        """Lines that are not empty, white space at both ends removed."""
        return [line for line in map(str.strip, self.text.split("\n")) if line]

    @cached_property
    def words(self) -> list[str]:
        """What white space separates."""
        return self.text.split()

    @cached_property
    def lowered(self) -> bytes:
        """The words in lower case with one space between, as UTF-8: the form in which documents are compared."""
        return " ".join(self.words).lower().encode()

    @cached_property
    def word_lengths(self) -> npt.NDArray[np.int64]:
        """Characters of each word."""
        return np.fromiter(map(len, self.words), dtype=np.int64, count=len(self.words))

    @cached_property
    def word_hashes(self) -> UInt64Array:
        """Hash of each word, case aside. Equal words have equal hashes in every process and on every machine."""
        words = self.lowered.split(b" ") if self.words else []
        hashes = np.fromiter(map(zlib.crc32, words), dtype=np.uint64, count=len(words))
        return (hashes + np.uint64(1)) * np.uint64(_MULTIPLIER)

    def n_gram_hashes(self, n: int) -> UInt64Array:
        """Hash of each run of n words; of all words together when there are fewer than n."""
        words = self.word_hashes
        n = min(n, len(words))
        if n == 0:
            return np.empty(0, dtype=np.uint64)
        count = len(words) - n + 1
        hashes = np.zeros(count, dtype=np.uint64)
        for place in range(n):
            # Each place in the run has its own odd factor, so that order matters.
            hashes += words[place : place + count] * np.uint64(_factor(place))
        return hashes ^ (hashes >> np.uint64(32))

    def repeated_n_grams(self, n: int, among: Int64Array | None = None) -> NGramGroups:
        """Runs of n words that occur more than once, of those that begin at the places `among` (None: anywhere)."""
        hashes = self.n_gram_hashes(n)
        if among is not None:
            among = among[among < len(hashes)]
            hashes = hashes[among]
        # One sort of whole numbers, hash above and place below, is many times faster than an indirect one.
        bits = np.uint64(max(len(hashes), 1).bit_length())
        below = (np.uint64(1) << bits) - np.uint64(1)
        keys = np.sort((hashes & ~below) | np.arange(len(hashes), dtype=np.uint64))
        places = (keys & below).astype(np.int64)
        same = keys[1:] >> bits == keys[:-1] >> bits
        repeat = np.concatenate(([False], same)) if keys.size else np.empty(0, dtype=bool)
        member = repeat.copy()
        member[:-1] |= same
        places = places if among is None else among[places]
        return NGramGroups(places[member], repeat[member])


def _factor(place: int) -> int:
    return (pow(_MULTIPLIER, place + 1, 1 << 64) * 2 + 1) & _MASK
