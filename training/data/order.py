"""The order in which samples are read: a pure function, no list, no state beyond two integers.

An epoch is a keyed permutation of 0..n-1, computed one element at a time: a Feistel network over the next power of two
whose results outside 0..n-1 are sent through again (cycle walking; Black and Rogaway 2002, "Ciphers with arbitrary
finite domains"). Epoch start therefore costs the same for ten sequences and for ten billion.

Epochs follow each other without a seam: stream position p is sample p mod n of epoch p div n. A global batch takes the
next `global_batch_size` positions, so it may finish one epoch and begin the next; inside an epoch nothing is read twice
and nothing is left out, whatever the batch size and however often the number of ranks changes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from training.errors import UsageError

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

_ROUNDS = 8
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)


@dataclass(frozen=True)
class Cursor:
    """Where a run stands: the next sample to read is number `sample` of epoch `epoch`, over all ranks together."""

    epoch: int = 0
    sample: int = 0

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.sample < 0:
            raise UsageError(f"cursor ({self.epoch}, {self.sample}) is negative", "take a cursor from a checkpoint")

    def position(self, n: int) -> int:
        """Position in the endless stream of epochs of `n` samples each."""
        if self.sample >= n:
            raise UsageError(
                f"the cursor points at sample {self.sample}, but an epoch has {n}: this is another dataset",
                "resume with the dataset the run was started with",
            )
        return self.epoch * n + self.sample

    def advance(self, samples: int, n: int) -> Cursor:
        """Cursor after `samples` more samples (over all ranks) of a dataset of `n`."""
        epoch, sample = divmod(self.position(n) + samples, n)
        return Cursor(epoch, sample)


def sample(seed: int, epoch: int, i: int, n: int) -> int:
    """Index in 0..n-1 of the dataset's sequence that is read as number `i` of `epoch`."""
    return int(samples(seed, epoch, np.array([i], dtype=np.int64), n)[0])


def samples(seed: int, epoch: int, positions: Int64Array, n: int, purpose: str = "order") -> Int64Array:
    """`sample` for many positions at once; int64 in, int64 out, same shape.

    `purpose` separates permutations that must not be correlated although seed and epoch are the same.
    """
    if positions.size and (positions.min() < 0 or positions.max() >= n):
        raise UsageError(f"position outside 0..{n - 1}", "positions of an epoch are smaller than its number of samples")
    if n == 1:
        return np.zeros_like(positions)
    bits = max(2, (n - 1).bit_length())
    keys = _round_keys(seed, epoch, purpose)
    result = _feistel(positions.astype(np.uint64), keys, bits)
    outside = np.flatnonzero(result >= n)
    while outside.size:  # the domain is smaller than 2n, so on average less than one further pass an element
        result[outside] = _feistel(result[outside], keys, bits)
        outside = outside[result[outside] >= n]
    return result.astype(np.int64)


def windowed_samples(
    seed: int, epoch: int, positions: Int64Array, n: int, *, block: int, window_blocks: int
) -> Int64Array:
    """Like `samples`, but any run of `block` * `window_blocks` positions touches few blocks of neighbouring sequences.

    Whole blocks of `block` sequences are permuted, then the sequences within each window of `window_blocks` blocks.
    Each epoch is still a permutation of 0..n-1; the last n mod `block` sequences stay at the epoch's end. For
    datasets larger than the local disk: only the shards of the current window and of the next one are needed.
    """
    blocks = n // block
    size = block * window_blocks
    windows, inner = np.divmod(positions, size)
    result = positions.copy()
    for window in np.unique(windows).tolist():
        here = windows == window
        start, length = window * size, min(size, n - window * size)
        result[here] = start + samples(seed, epoch, inner[here], length, f"window/{window}")
    whole = result < blocks * block
    numbers, rest = np.divmod(result[whole], block)
    result[whole] = samples(seed, epoch, numbers, max(blocks, 1), "blocks") * block + rest
    return result


@lru_cache(maxsize=256)
def _round_keys(seed: int, epoch: int, purpose: str) -> UInt64Array:
    digest = hashlib.blake2b(f"{purpose}/{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _feistel(values: UInt64Array, keys: UInt64Array, bits: int) -> UInt64Array:
    """Bijection of 0..2^bits-1: the halves are combined in turn with a hash of the other half."""
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    high, low = values >> low_bits, values & low_mask
    for number in range(_ROUNDS):
        if number % 2:
            low = low ^ (_mix(high, keys[number]) & low_mask)
        else:
            high = high ^ (_mix(low, keys[number]) & high_mask)
    return (high << low_bits) | low


def _mix(values: UInt64Array, key: np.uint64) -> UInt64Array:
    """Finaliser of splitmix64 (Steele, Lea and Flood 2014): every output bit depends on every input bit."""
    z = values ^ key
    z = (z ^ (z >> _SHIFT_1)) * _MULTIPLY_1
    z = (z ^ (z >> _SHIFT_2)) * _MULTIPLY_2
    return np.asarray(z ^ (z >> _SHIFT_3), dtype=np.uint64)


def accumulation_steps(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Micro-batches that a rank computes for one global batch. Raises UsageError when the batch does not factor."""
    per_step = micro_batch_size * world_size
    if per_step <= 0 or global_batch_size % per_step:
        raise UsageError(
            f"batch {global_batch_size} is not a multiple of micro-batch {micro_batch_size} x {world_size} ranks",
            "choose batch_size = micro_batch_size x accumulation x ranks",
        )
    return global_batch_size // per_step


def split_by_epoch(positions: Int64Array, n: int) -> list[tuple[int, Int64Array]]:
    """Ascending stream positions as (epoch, positions within it) groups, in order."""
    epochs, offsets = np.divmod(positions, n)
    return [(int(epoch), offsets[epochs == epoch]) for epoch in np.unique(epochs)]


def rank_positions(
    start: int, *, global_batch_size: int, micro_batch_size: int, rank: int, world_size: int
) -> Int64Array:
    """Stream positions that `rank` reads of the global batch that begins at `start`; int64 [accumulation, micro-batch].

    Accumulation step a of the batch is a run of micro_batch_size * world_size positions, cut among the ranks in order:
    the ranks' parts are disjoint and together are exactly start .. start + global_batch_size - 1.
    """
    steps = accumulation_steps(global_batch_size, micro_batch_size, world_size)
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is outside 0..{world_size - 1}", "check RANK and WORLD_SIZE")
    first = start + np.arange(steps, dtype=np.int64) * (micro_batch_size * world_size) + rank * micro_batch_size
    return first[:, None] + np.arange(micro_batch_size, dtype=np.int64)[None, :]
