"""Micro-batches for one rank, as torch tensors. The only module of this package that imports torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from training.data.dataset import label_mask
from training.data.formats import TokenArray
from training.data.order import Cursor, Int64Array, rank_positions, split_by_epoch
from training.errors import LoopworksError

Batch = tuple[torch.Tensor, torch.Tensor]


class OrderedDataset(Protocol):
    """What the loader needs of a dataset: TokenDataset and Mixture have it."""

    def __len__(self) -> int: ...

    @property
    def pad_token_id(self) -> int | None: ...

    def order(self, seed: int, epoch: int, positions: Int64Array) -> Int64Array: ...

    def read(self, indices: Int64Array) -> TokenArray: ...

    def stage(self, indices: Int64Array) -> None: ...


class MicroBatchLoader:
    """Endless iterator over this rank's micro-batches; counts the time its user had to wait.

    `wait_s` is the total time spent inside `next`: the part of a step that is data.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._batches = iter(loader)
        self.wait_s = 0.0
        self.batches = 0

    def __iter__(self) -> MicroBatchLoader:
        return self

    def __next__(self) -> Batch:
        started = time.perf_counter()
        batch = _checked(next(self._batches))
        self.wait_s += time.perf_counter() - started
        self.batches += 1
        return batch


def make_loader(
    dataset: OrderedDataset,
    *,
    seed: int,
    cursor: Cursor,
    global_batch_size: int,
    micro_batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
    pin_memory: bool = False,
    prefetch_factor: int = 4,
    stage_ahead: int = 16,
) -> MicroBatchLoader:
    """Micro-batches of `rank` from `cursor` on, without end: (input_ids, labels), int64, both [micro-batch, T].

    Every `global_batch_size / (micro_batch_size * world_size)` micro-batches complete a global batch; after it the
    cursor is `cursor.advance(global_batch_size, len(dataset))`. Padding has the label -100. Epochs follow each other
    without a seam (see order.py). Raises UsageError when the batch does not factor, DataError when a shard is damaged.
    """
    rank_positions(
        0, global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, rank=rank, world_size=world_size
    )
    sampler = _MicroBatches(dataset, seed, cursor, global_batch_size, micro_batch_size, rank, world_size, stage_ahead)
    return MicroBatchLoader(_torch_loader(dataset, sampler, num_workers, pin_memory, prefetch_factor))


def make_evaluation_loader(
    dataset: OrderedDataset,
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    max_sequences: int | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Iterator[Batch]:
    """This rank's part of the first `max_sequences` sequences in storage order, once: sequence i goes to rank i mod w.

    The last batch may be smaller; a rank may have one batch less than another. Shapes as in `make_loader`.
    """
    total = len(dataset) if max_sequences is None else min(max_sequences, len(dataset))
    mine = list(range(rank, total, world_size))
    batches = [mine[start : start + batch_size] for start in range(0, len(mine), batch_size)]
    return map(_checked, _torch_loader(dataset, batches, num_workers, pin_memory, 4))


class _Rows:
    """Reads a list of sequence numbers at once, so that a batch costs one pass over the shards it touches."""

    def __init__(self, source: OrderedDataset) -> None:
        self._source = source

    def __getitems__(self, indices: list[int]) -> Batch | LoopworksError:
        try:
            rows = self._source.read(np.asarray(indices, dtype=np.int64)).astype(np.int64)
        except LoopworksError as error:
            # Raised in a worker it would come out wrapped in a traceback; as a value it stays what it is.
            return error
        labels = label_mask(rows, self._source.pad_token_id)
        return torch.from_numpy(np.ascontiguousarray(rows[:, :-1])), torch.from_numpy(labels)

    def __getitem__(self, index: int) -> Batch | LoopworksError:
        return self.__getitems__([index])


class _MicroBatches:
    def __init__(
        self,
        dataset: OrderedDataset,
        seed: int,
        cursor: Cursor,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        stage_ahead: int,
    ) -> None:
        self._stage_ahead = stage_ahead
        self._dataset, self._seed, self._length = dataset, seed, len(dataset)
        self._start = cursor.position(self._length)
        self._global_batch_size = global_batch_size
        self._share = {
            "global_batch_size": global_batch_size,
            "micro_batch_size": micro_batch_size,
            "rank": rank,
            "world_size": world_size,
        }

    def __iter__(self) -> Iterator[list[int]]:
        ahead: deque[Int64Array] = deque()
        for indices in self._indices():
            # Shards in an object store are asked for well before they are read.
            self._dataset.stage(indices)
            ahead.append(indices)
            if len(ahead) > self._stage_ahead:
                yield ahead.popleft().tolist()

    def _indices(self) -> Iterator[Int64Array]:
        start = self._start
        while True:
            for positions in rank_positions(start, **self._share):
                yield stream_indices(self._dataset, self._seed, positions)
            start += self._global_batch_size


def stream_indices(dataset: OrderedDataset, seed: int, positions: Int64Array) -> Int64Array:
    """Sequence numbers at positions of the endless stream of epochs; positions ascend and may cross an epoch's end."""
    groups = split_by_epoch(positions, len(dataset))
    return np.concatenate([dataset.order(seed, epoch, offsets) for epoch, offsets in groups])


def _torch_loader(
    dataset: OrderedDataset, batches: Any, num_workers: int, pin_memory: bool, prefetch_factor: int
) -> DataLoader[Any]:
    return DataLoader(
        _Rows(dataset),
        batch_sampler=batches,
        collate_fn=_as_is,
        num_workers=num_workers,
        pin_memory=pin_memory,
        prefetch_factor=prefetch_factor if num_workers else None,
    )


def _as_is(batch: Any) -> Any:
    return batch


def _checked(batch: Batch | LoopworksError) -> Batch:
    if isinstance(batch, LoopworksError):
        raise batch
    return batch
