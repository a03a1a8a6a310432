"""What a model has to beat: held-out perplexity of a unigram and of an interpolated bigram model.

Both are estimated on the training tokens and scored on exactly the positions that the language model predicts: tokens
1..T of each sequence, each one given the token before it.

Unigram: additive smoothing, P(w) = (c(w) + k) / (N + k V) with k = 1.
Bigram: interpolated Kneser-Ney (Kneser and Ney 1995; Chen and Goodman 1998, equation 26), absolute discount
D = n1 / (n1 + 2 n2) from the numbers of bigrams seen once and twice, the lower order being the continuation
distribution, itself mixed with the uniform one so that an unseen token keeps some probability.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from training.data.formats import TokenArray
from training.errors import DataError

Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class BaselineResult:
    """Held-out perplexities over `predictions` positions."""

    unigram_perplexity: float
    bigram_perplexity: float
    predictions: int


def baseline_perplexities(
    train: Iterable[TokenArray], held_out: Iterable[TokenArray], vocab_size: int, pad_token_id: int | None = None
) -> BaselineResult:
    """Perplexities on `held_out` of models estimated on `train`; both are blocks of sequences [n, T + 1].

    Memory grows with the number of different bigrams. Raises DataError when either side is empty.
    """
    keys, counts = count_pairs(train, vocab_size, pad_token_id)
    held_keys, held_counts = count_pairs(held_out, vocab_size, pad_token_id)
    if not keys.size or not held_keys.size:
        raise DataError("there are no tokens to compute the baselines on", "prepare a dataset with both splits")
    held_words = held_keys % vocab_size
    unigram = _unigram(keys % vocab_size, counts, vocab_size)
    bigram = KneserNey(keys, counts, vocab_size)
    total = int(held_counts.sum())
    return BaselineResult(
        _perplexity(unigram[held_words], held_counts),
        _perplexity(bigram.probability(held_keys), held_counts),
        total,
    )


def _perplexity(probabilities: FloatArray, counts: Int64Array) -> float:
    return float(np.exp(-(counts * np.log(probabilities)).sum() / counts.sum()))


def count_pairs(blocks: Iterable[TokenArray], vocab_size: int, pad: int | None) -> tuple[Int64Array, Int64Array]:
    """Sorted keys previous * V + next of all predicted positions, with their counts."""
    keys, counts = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    for block in blocks:
        previous, following = block[:, :-1].astype(np.int64).ravel(), block[:, 1:].astype(np.int64).ravel()
        if pad is not None:
            real = following != pad
            previous, following = previous[real], following[real]
        new_keys, new_counts = np.unique(previous * vocab_size + following, return_counts=True)
        keys, inverse = np.unique(np.concatenate((keys, new_keys)), return_inverse=True)
        counts = np.bincount(inverse, weights=np.concatenate((counts, new_counts)), minlength=len(keys)).astype(
            np.int64
        )
    return keys, counts


def _unigram(words: Int64Array, counts: Int64Array, vocab_size: int) -> FloatArray:
    totals = np.bincount(words, weights=counts, minlength=vocab_size)
    smoothed: FloatArray = (totals + 1.0) / (totals.sum() + vocab_size)
    return smoothed


class KneserNey:
    """Interpolated Kneser-Ney bigram model of sorted keys previous * V + next with their counts."""

    def __init__(self, keys: Int64Array, counts: Int64Array, vocab_size: int) -> None:
        self._keys, self._counts, self._vocab_size = keys, counts.astype(np.float64), vocab_size
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        # Without bigrams seen once and twice the estimate is undefined; 0.75 is the usual value.
        self._discount = once / (once + 2 * twice) if once and twice else 0.75
        previous, following = np.divmod(keys, vocab_size)
        self._context_total = np.bincount(previous, weights=counts, minlength=vocab_size)
        self._context_types = np.bincount(previous, minlength=vocab_size).astype(np.float64)
        kinds = np.bincount(following, minlength=vocab_size).astype(np.float64)
        reserved = 0.5 * min(1.0, vocab_size / len(keys))
        discounted = np.maximum(kinds - reserved, 0.0)
        spare = 1.0 - discounted.sum() / len(keys)
        self._continuation = discounted / len(keys) + spare / vocab_size

    def probability(self, keys: Int64Array) -> FloatArray:
        """P(next | previous) for keys previous * V + next; it sums to one over the vocabulary."""
        previous, following = np.divmod(keys, self._vocab_size)
        place = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        counts = np.where(self._keys[place] == keys, self._counts[place], 0.0)
        totals = self._context_total[previous]
        seen = np.maximum(totals, 1.0)
        direct = np.maximum(counts - self._discount, 0.0) / seen
        weight = np.where(totals > 0, self._discount * self._context_types[previous] / seen, 1.0)
        result: FloatArray = direct + weight * self._continuation[following]
        return result
