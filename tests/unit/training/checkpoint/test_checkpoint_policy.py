"""Interval and retention rules."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.checkpoint.policy import (
    Interval,
    Kept,
    best_interval_s,
    lost_time_ratio,
    mean_time_between_failures_s,
    save_seconds,
    to_keep,
)

seconds = st.floats(1e-3, 1e4)


def test_interval_in_steps_and_in_time():
    assert [s for s in range(1, 13) if Interval(steps=4).due(s, 0, 0.0)] == [4, 8, 12]
    assert not Interval(steps=4).due(8, 8, 0.0)
    assert Interval(seconds=60).due(3, 2, 60.0)
    assert not Interval(seconds=60).due(3, 2, 59.0)
    assert not Interval().due(100, 0, 1e9)


def test_the_published_example():
    """1,024 GPUs, one failure in 7.9 h, 20 s: about 18 minutes, 1.9 % for saving."""
    interval = best_interval_s(20, 7.9 * 3600)
    assert interval / 60 == pytest.approx(17.8, abs=0.1)
    assert 20 / interval == pytest.approx(0.0187, abs=0.0005)


@given(stall=seconds, mtbf=st.floats(1e4, 1e8), factor=st.floats(0.2, 5).filter(lambda f: abs(f - 1) > 0.01))
def test_no_other_interval_loses_less_time(stall, mtbf, factor):
    best = math.sqrt(2 * stall * mtbf)
    assert lost_time_ratio(best, stall, mtbf) < lost_time_ratio(best * factor, stall, mtbf)


def test_interval_is_not_shorter_than_the_write():
    assert best_interval_s(0.001, 100.0, background_s=30) == 30


def test_failures_scale_with_the_machines():
    assert mean_time_between_failures_s(16384) / 3600 == pytest.approx(3.05, abs=0.01)
    assert mean_time_between_failures_s(8, gpu_hours=80) == 36000


checkpoints = st.lists(
    st.builds(Kept, st.integers(1, 500), st.none() | st.floats(0, 10) | st.just(math.nan)), unique_by=lambda c: c.step
)


@given(checkpoints, st.integers(1, 5), st.none() | st.integers(1, 100), st.integers(0, 3))
def test_retention(known, last, every, best):
    keep = to_keep(known, keep_last=last, keep_every_steps=every, keep_best=best)
    steps = sorted(c.step for c in known)
    assert keep <= set(steps)
    assert set(steps[-last:]) <= keep
    assert all(s in keep for s in steps if every and s % every == 0)
    losses = sorted(
        c.evaluation_loss for c in known if c.evaluation_loss is not None and not math.isnan(c.evaluation_loss)
    )
    kept_losses = [c.evaluation_loss for c in known if c.step in keep]
    assert all(loss in kept_losses for loss in losses[:best])
    # Retention is stable: what was kept is kept again when nothing was added.
    survivors = [c for c in known if c.step in keep]
    assert to_keep(survivors, keep_last=last, keep_every_steps=every, keep_best=best) == keep


def test_the_big_model_fits_into_the_notice_of_a_spot_node():
    """3.5B parameters in bf16 with Adam are 50 GB: 8 nodes at 2 GB/s each need 6 s, one node 25 s."""
    parameters = 3_564_976_800
    assert parameters * 14 == pytest.approx(49.9e9, rel=0.01)
    assert save_seconds(parameters, nodes=8, node_write_bytes_per_s=2e9) == pytest.approx(6.2, abs=0.3)
    assert save_seconds(parameters, nodes=1, node_write_bytes_per_s=2e9) == pytest.approx(25, abs=0.5)
    assert save_seconds(parameters, nodes=8, node_write_bytes_per_s=2e9, storage_write_bytes_per_s=1e9) > 49
