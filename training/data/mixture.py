"""Several datasets read as one, each with a weight, with the same guarantees as a single one.

A weight is a number of passes: in an epoch of the mixture a dataset of n sequences gives round(weight * n) of them.
They are taken from the dataset's own endless stream of epochs, each mixture epoch going on where the last one
stopped: with weight 0.25 four epochs read it exactly once, with weight 2 every epoch reads it twice. So no sequence
comes again before all others of its dataset have had their turn. The epoch's sequences are then permuted together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from training.config.schema import DataSection
from training.data.dataset import TokenDataset, open_dataset
from training.data.formats import TokenArray
from training.data.manifest import Manifest
from training.data.order import Int64Array, samples, split_by_epoch
from training.errors import DataError


class Mixture:
    """Datasets with weights, read like one dataset of `len(mixture)` sequences an epoch."""

    def __init__(self, parts: Sequence[tuple[TokenDataset, float]]) -> None:
        self._datasets = [dataset for dataset, _ in parts]
        _check_compatible(self._datasets)
        sizes = np.array([len(dataset) for dataset in self._datasets], dtype=np.int64)
        self._share = np.array([round(weight * len(dataset)) for dataset, weight in parts], dtype=np.int64)
        self._ends = np.cumsum(self._share)
        self._last = np.cumsum(sizes)  # sequence numbers of the mixture: all datasets one after the other
        self._first = self._last - sizes
        if not len(self):
            raise DataError("the mixture is empty: no dataset has a weight that gives a sequence", "raise the weights")

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def sequence_length(self) -> int:
        """Tokens a model sees at once."""
        return self._datasets[0].sequence_length

    @property
    def pad_token_id(self) -> int | None:
        """Id of padding, or None."""
        return self._datasets[0].pad_token_id

    @property
    def tokenizer_file(self) -> Path:
        """The tokenizer of all datasets."""
        return self._datasets[0].tokenizer_file

    def blocks(self, sequences: int = 1024) -> Iterable[TokenArray]:
        """All sequences of all datasets in storage order, each once, `sequences` at a time."""
        for dataset in self._datasets:
            yield from dataset.blocks(sequences)

    @property
    def manifest(self) -> Manifest:
        """Manifest of the first dataset; tokenizer and shape are the same in all."""
        return self._datasets[0].manifest

    def order(self, seed: int, epoch: int, positions: Int64Array) -> Int64Array:
        """Sequence numbers read at `positions` of `epoch`: a pure function of seed, epoch, sizes and weights."""
        slots = samples(seed, epoch, positions, len(self), "mixture")
        owners = np.searchsorted(self._ends, slots, side="right")
        numbers = np.empty_like(slots)
        for owner in np.unique(owners).tolist():
            mine = owners == owner
            share = int(self._share[owner])
            stream = epoch * share + slots[mine] - (int(self._ends[owner]) - share)
            numbers[mine] = self._first[owner] + self._from_stream(owner, seed, stream)
        return numbers

    def _from_stream(self, owner: int, seed: int, stream: Int64Array) -> Int64Array:
        ascending = np.argsort(stream, kind="stable")
        size = len(self._datasets[owner])
        parts = [
            samples(seed, epoch, offsets, size, f"mixture/{owner}")
            for epoch, offsets in split_by_epoch(stream[ascending], size)
        ]
        result = np.empty_like(stream)
        result[ascending] = np.concatenate(parts)
        return result

    def read(self, indices: Int64Array) -> TokenArray:
        """The sequences numbered `indices`, shape [len(indices), sequence_length + 1]. Raises DataError."""
        owners = np.searchsorted(self._last, indices, side="right")
        rows = np.empty((len(indices), self.sequence_length + 1), dtype=np.uint32)
        for owner in np.unique(owners).tolist():
            mine = np.flatnonzero(owners == owner)
            rows[mine] = self._datasets[owner].read(indices[mine] - self._first[owner])
        return rows

    def stage(self, indices: Int64Array) -> None:
        """Begins to fetch the shards that hold sequences `indices`, where shards have to be fetched."""
        owners = np.searchsorted(self._last, indices, side="right")
        for owner in np.unique(owners).tolist():
            self._datasets[owner].stage(indices[owners == owner] - self._first[owner])

    def close(self) -> None:
        """Closes every dataset."""
        for dataset in self._datasets:
            dataset.close()


def open_data(section: DataSection, split: str = "train") -> TokenDataset | Mixture:
    """Opens what the `data:` section of a configuration names. Raises DataError."""

    def opened(path: str, window: int | None) -> TokenDataset:
        return open_dataset(
            path,
            split,
            verify_checksums=section.verify_checksums,
            shuffle_window_bytes=window,
            cache_dir=Path(section.cache_dir).expanduser(),
            cache_limit_bytes=section.cache_limit_bytes,
        )

    if section.mixture is None:
        return opened(section.path, section.shuffle_window_bytes)
    return Mixture([(opened(path, None), weight) for path, weight in section.mixture.items()])


def _check_compatible(datasets: Sequence[TokenDataset]) -> None:
    if not datasets:
        raise DataError("the mixture names no dataset", "list datasets with weights")
    first = datasets[0]
    for other in datasets[1:]:
        for what, a, b in (
            ("sequence length", first.sequence_length, other.sequence_length),
            ("tokenizer", first.manifest.tokenizer_sha256, other.manifest.tokenizer_sha256),
            ("padding token", first.pad_token_id, other.pad_token_id),
        ):
            if a != b:
                raise DataError(
                    f"{first.folder} and {other.folder} do not go together: {what} {a} and {b}",
                    "prepare both with the same --tokenizer FILE and --seq-len",
                )
