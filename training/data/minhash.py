"""MinHash keys: documents that share one are near duplicates with high probability.

Signatures are datasketch's; its optimiser chooses the bands for the threshold (Leskovec, Rajaraman and Ullman, Mining
of Massive Datasets, chapter 3). Two documents of Jaccard similarity s share a band with probability 1 - (1 - s^r)^b.
The library's own index lies in memory, so bands are compared on disk (see stage_dedup).
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from datasketch import MinHash, MinHashLSH

from training.config.prepare import DedupSection
from training.data.textview import TextView

UInt64Array = npt.NDArray[np.uint64]
# Shingles times permutations that are computed at once: about what the processor caches hold.
_CHUNK = 512


@lru_cache(maxsize=4)
def _bands(threshold: float, num_perm: int) -> tuple[int, int]:
    index = MinHashLSH(threshold=threshold, num_perm=num_perm)
    return int(index.b), int(index.r)


@lru_cache(maxsize=4)
def _empty(num_perm: int) -> MinHash:
    return MinHash(num_perm=num_perm, hashfunc=int, scheme="affine32")


def signature(view: TextView, settings: DedupSection) -> npt.NDArray[np.uint32]:
    """MinHash values of the document's set of word n-grams, uint32 [num_perm]."""
    shingles = _mix((view.n_gram_hashes(settings.n_gram) & np.uint64(0xFFFFFFFF)).astype(np.uint32))
    sketch = _empty(settings.num_perm)
    factor, summand = sketch.permutations
    values = np.array(sketch.hashvalues, dtype=np.uint32)
    for start in range(0, len(shingles), _CHUNK):
        chunk = shingles[start : start + _CHUNK, None]
        np.minimum(values, (chunk * factor + summand).min(axis=0), out=values)
    return values


def _mix(values: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Finaliser of MurmurHash3 (32 bits), which datasketch puts before its permutations."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        values = (values ^ (values >> np.uint32(shift))) * np.uint32(factor)
    return values ^ (values >> np.uint32(16))


def band_keys(view: TextView, settings: DedupSection) -> UInt64Array:
    """One 64-bit key a band, uint64 [bands]; different bands never share a key but by chance."""
    bands, rows = _bands(settings.threshold, settings.num_perm)
    values = signature(view, settings)
    digests = (
        hashlib.blake2b(values[band * rows : (band + 1) * rows].tobytes(), digest_size=8, key=bytes([band])).digest()
        for band in range(bands)
    )
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


def band_count(settings: DedupSection) -> int:
    """Number of keys a document has."""
    return _bands(settings.threshold, settings.num_perm)[0]
