"""The torch loader: micro-batches of all ranks together are the global stream, whatever reads them."""

import numpy as np
import pytest
import torch

from training.data import open_dataset
from training.data.loader import make_evaluation_loader, make_loader
from training.data.order import Cursor, samples
from training.errors import DataError, UsageError


class Numbered:
    """A dataset whose sequence i is i, i+1, i+2 ...; the last token is padding."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.pad_token_id = 9999

    def __len__(self):
        return self.n

    def order(self, seed, epoch, positions):
        return samples(seed, epoch, positions, self.n)

    def read(self, indices):
        rows = indices[:, None] + np.arange(5)[None, :]
        rows[:, -1] = self.pad_token_id
        return rows.astype(np.uint16)

    def stage(self, indices):
        pass


def read_global(dataset, cursor, batches, *, world, micro, size=12, workers=0):
    """First tokens in global order, as all ranks together read them."""
    steps = size // (world * micro)
    loaders = [
        make_loader(
            dataset,
            seed=5,
            cursor=cursor,
            global_batch_size=size,
            micro_batch_size=micro,
            rank=rank,
            world_size=world,
            num_workers=workers,
        )
        for rank in range(world)
    ]
    return [
        int(number) for _ in range(batches * steps) for loader in loaders for number in next(loader)[0][:, 0]
    ], cursor.advance(batches * size, len(dataset))


def test_shapes_types_shift_and_padding():
    input_ids, labels = next(
        make_loader(Numbered(10), seed=0, cursor=Cursor(), global_batch_size=4, micro_batch_size=4)
    )
    assert input_ids.shape == labels.shape == (4, 4)
    assert input_ids.dtype == labels.dtype == torch.int64
    assert torch.equal(labels[:, :-1], input_ids[:, 1:])
    assert (labels[:, -1] == -100).all()


def test_four_then_two_then_three_ranks_in_the_middle_of_epoch_two_read_the_same_stream():
    dataset, cursor, read = Numbered(31), Cursor(), []
    for world, micro, batches in ((4, 1, 4), (2, 3, 2), (3, 2, 3)):
        numbers, cursor = read_global(dataset, cursor, batches, world=world, micro=micro)
        read += numbers
    alone, end = read_global(dataset, Cursor(), 9, world=1, micro=12)
    assert read == alone and cursor == end == Cursor(3, 15)
    for epoch in range(3):
        assert sorted(read[epoch * 31 : (epoch + 1) * 31]) == list(range(31))


def test_worker_processes_read_the_same_in_the_same_order():
    dataset = Numbered(20)
    assert read_global(dataset, Cursor(1, 3), 3, world=1, micro=3, workers=2) == read_global(
        dataset, Cursor(1, 3), 3, world=1, micro=3
    )


def test_worker_processes_open_shards_for_themselves(prepared):
    dataset = open_dataset(prepared)
    dataset.read(np.arange(len(dataset)))  # the handles of this process are open when the workers begin
    options = {"seed": 3, "cursor": Cursor(), "global_batch_size": 8, "micro_batch_size": 4}
    forked, here = make_loader(dataset, **options, num_workers=2), make_loader(dataset, **options)
    for _ in range(12):
        assert all(map(torch.equal, next(forked), next(here)))


class Damaged(Numbered):
    def read(self, indices):
        raise DataError("shard.tfrecord: record 3 at offset 99: checksum of payload is wrong", "fetch it again")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_shard_is_told_plainly_from_a_worker_too(workers):
    options = {"seed": 0, "cursor": Cursor(), "global_batch_size": 2, "micro_batch_size": 2}
    with pytest.raises(DataError) as caught:
        next(make_loader(Damaged(10), **options, num_workers=workers))
    assert str(caught.value) == str(caught.value.cause) + "\n  next: fetch it again"
    assert caught.value.cause.startswith("shard.tfrecord: record 3 at offset 99")
    with pytest.raises(DataError, match="record 3"):
        next(make_evaluation_loader(Damaged(10), batch_size=2, num_workers=workers))


def test_waiting_is_measured():
    loader = make_loader(Numbered(10), seed=0, cursor=Cursor(), global_batch_size=2, micro_batch_size=1)
    next(loader), next(loader)
    assert loader.batches == 2 and loader.wait_s > 0


def test_a_batch_that_does_not_factor_is_refused_at_once():
    with pytest.raises(UsageError, match="not a multiple"):
        make_loader(Numbered(10), seed=0, cursor=Cursor(), global_batch_size=5, micro_batch_size=2)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_reads_each_sequence_once(world):
    numbers = [
        int(number)
        for rank in range(world)
        for ids, _ in make_evaluation_loader(Numbered(23), batch_size=4, rank=rank, world_size=world, max_sequences=17)
        for number in ids[:, 0]
    ]
    assert sorted(numbers) == list(range(17))
