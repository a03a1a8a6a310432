"""Loss guards: what is a spike, what is rolled back and skipped, when the run gives up."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.guards import (
    GiveUp,
    GuardSettings,
    GuardState,
    Rollback,
    Skip,
    health_alarms,
    next_position,
    observe,
    plan_rollback,
)

SETTINGS = GuardSettings()


def _run(losses, settings=SETTINGS):
    state, verdicts = GuardState(), []
    for step, loss in enumerate(losses, start=1):
        state, verdict = observe(state, step, loss, settings)
        verdicts.append(verdict)
    return state, verdicts


def _curve(steps, seed=0, noise=0.1):
    draw = random.Random(seed)
    return [3.0 + 5.0 * math.exp(-step / 100) + draw.gauss(0, noise) for step in range(steps)]


@pytest.mark.parametrize("seed", range(10))
def test_an_ordinary_noisy_run_is_never_rolled_back(seed):
    _, verdicts = _run(_curve(3000, seed))
    assert "roll back" not in verdicts


def test_a_lasting_spike_is_rolled_back_after_the_patience():
    losses = _curve(400) + [9.0] * 4
    state, verdicts = _run(losses)
    assert verdicts[400:] == ["suspect"] * 3 + ["roll back"]
    assert state.bad_since == 401


def test_a_single_outlier_is_let_pass():
    state, verdicts = _run([*_curve(400), 9.0, 9.0, 3.1])
    assert verdicts[-3:] == ["suspect", "suspect", "good"]
    assert state.bad_since is None


def test_non_finite_losses_count_even_during_warm_up():
    _, verdicts = _run([10.0, math.nan, math.inf, -math.inf, math.nan])
    assert verdicts == ["good", "suspect", "suspect", "suspect", "roll back"]


def test_a_spike_does_not_raise_the_mean_it_is_judged_by():
    before, _ = _run(_curve(400))
    after, _ = _run(_curve(400) + [50.0] * 3)
    assert (after.mean, after.deviation) == (before.mean, before.deviation)


def test_a_high_start_is_no_spike():
    _, verdicts = _run([11.0, 30.0, 12.0, 10.0])
    assert verdicts == ["good"] * 4


def test_the_plan_names_steps_and_data():
    state, _ = _run(_curve(400) + [9.0] * 4)
    plan = plan_rollback(state, 404, Skip(400 * 32, 404 * 32), 0, SETTINGS)
    assert isinstance(plan, Rollback)
    assert plan.at_most_step == 400
    assert plan.skip == Skip(12800, 12928)
    assert "from step 401 to 404" in plan.reason


def test_the_budget_ends_the_run():
    plan = plan_rollback(GuardState(bad_since=5), 8, Skip(0, 8), 3, SETTINGS)
    assert isinstance(plan, GiveUp)
    assert "3 rollbacks" in plan.reason


skips = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 50)).map(lambda p: Skip(p[0], p[0] + p[1])), max_size=5)


@given(st.integers(0, 300), st.integers(1, 16), skips)
def test_the_next_batch_touches_nothing_that_is_skipped(position, batch, ranges):
    found = next_position(position, batch, ranges)
    assert found >= position
    assert not any(s.first < found + batch and found < s.stop for s in ranges)
    assert next_position(found, batch, ranges) == found


def test_health_alarms():
    assert health_alarms(0.3, 40.0, 20.0) == []
    assert health_alarms(None, None, None) == []
    assert "become the same" in health_alarms(0.99, None, None)[0]
    assert "ignores the recurrence" in health_alarms(0.1, 20.05, 20.0)[0]
