"""The order of reading: a permutation, pure, the same for any number of ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data.order import Cursor, accumulation_steps, rank_positions, sample, samples, split_by_epoch
from training.errors import UsageError


@given(seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6), n=st.integers(1, 3000))
def test_an_epoch_is_a_permutation(seed, epoch, n):
    order = samples(seed, epoch, np.arange(n), n)
    assert sorted(order.tolist()) == list(range(n))


@given(seed=st.integers(0, 2**32), n=st.integers(1, 10**15), data=st.data())
def test_one_element_equals_the_same_element_of_many(seed, n, data):
    i = data.draw(st.integers(0, n - 1))
    j = data.draw(st.integers(0, n - 1))
    together = samples(seed, 3, np.array([i, j]), n)
    assert [sample(seed, 3, i, n), sample(seed, 3, j, n)] == together.tolist()
    assert together.min() >= 0 and together.max() < n
    assert (i == j) == (together[0] == together[1])


def test_order_never_changes_between_versions():
    # Runs of months resume by this function: a change of these numbers breaks every running one.
    assert samples(42, 0, np.arange(10), 10).tolist() == [2, 8, 9, 1, 7, 5, 4, 0, 3, 6]
    assert [sample(42, 1, i, 10**12) for i in range(3)] == [307857288248, 546253060010, 913352010412]


def read_stream(seed, positions, n):
    return [int(i) for epoch, offsets in split_by_epoch(positions, n) for i in samples(seed, epoch, offsets, n)]


def test_epochs_and_seeds_differ_and_look_random():
    n = 20_000
    first, second = samples(1, 0, np.arange(n), n), samples(1, 1, np.arange(n), n)
    other = samples(2, 0, np.arange(n), n)
    for order in (second, other):
        assert (first == order).sum() < 10
    for order in (first, second, other):
        assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.03
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03


def test_every_place_is_about_equally_likely():
    n, seeds = 7, 3000
    hits = np.zeros((n, n))
    for seed in range(seeds):
        hits[np.arange(n), samples(seed, 0, np.arange(n), n)] += 1
    expected = seeds / n
    chi_squared = ((hits - expected) ** 2 / expected).sum()
    assert chi_squared < 36 + 4 * np.sqrt(2 * 36)  # 36 degrees of freedom, four standard deviations


def test_positions_outside_the_epoch_are_refused():
    with pytest.raises(UsageError, match="outside"):
        sample(1, 0, 10, 10)
    with pytest.raises(UsageError, match="outside"):
        sample(1, 0, -1, 10)


@given(
    micro=st.integers(1, 5),
    steps=st.integers(1, 5),
    world=st.integers(1, 7),
    start=st.integers(0, 10**9),
)
def test_ranks_share_a_global_batch_without_gap_or_overlap(micro, steps, world, start):
    size = micro * steps * world
    parts = [
        rank_positions(start, global_batch_size=size, micro_batch_size=micro, rank=rank, world_size=world)
        for rank in range(world)
    ]
    assert all(part.shape == (steps, micro) for part in parts)
    # In reading order (step, then rank) it is the plain sequence of positions.
    assert np.stack(parts, axis=1).ravel().tolist() == list(range(start, start + size))


@settings(max_examples=200, deadline=None)
@given(
    n=st.integers(1, 60),
    phases=st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(0, 12)), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_any_sequence_of_world_sizes_reads_every_sample_once_an_epoch(n, phases, seed):
    """Read with changing numbers of ranks: the global order is the one a single rank would have read."""
    size, cursor, read = 12, Cursor(), []
    for world, batches in phases:
        for _ in range(batches):
            parts = [
                rank_positions(
                    cursor.position(n), global_batch_size=size, micro_batch_size=1, rank=rank, world_size=world
                )
                for rank in range(world)
            ]
            positions = np.stack(parts, axis=1).ravel()
            read += read_stream(seed, positions, n)
            cursor = cursor.advance(size, n)
    single = read_stream(seed, np.arange(len(read)), n)
    assert read == single
    for epoch in range(len(read) // n):
        assert sorted(read[epoch * n : (epoch + 1) * n]) == list(range(n))
    rest = read[len(read) // n * n :]
    assert len(set(rest)) == len(rest) == cursor.sample and cursor.epoch == len(read) // n


def test_a_batch_that_does_not_factor_is_refused():
    assert accumulation_steps(32, 4, 2) == 4
    with pytest.raises(UsageError, match="not a multiple"):
        accumulation_steps(32, 4, 3)


def test_a_cursor_of_another_dataset_is_refused():
    with pytest.raises(UsageError, match="another dataset"):
        Cursor(0, 10).position(10)
    with pytest.raises(UsageError, match="negative"):
        Cursor(0, -1)
