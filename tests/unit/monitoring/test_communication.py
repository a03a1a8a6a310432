"""Exposed communication: the arithmetic of intervals, and what a sample may cost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.callbacks import StepReport
from training.communication import CommunicationSampler, classify, exposed, exposed_by_phase, union
from training.phases import PhaseClock, Span


def seconds(intervals: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in intervals)


interval = st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (float(pair[0]), float(sum(pair))))
intervals = st.lists(interval, max_size=12)


@pytest.mark.parametrize(
    ("collectives", "computation", "expected"),
    [
        ([(0, 10)], [], 10),
        ([(0, 10)], [(0, 10)], 0),
        ([(0, 10)], [(2, 4), (3, 6)], 6),
        ([(0, 4), (2, 8)], [(7, 20)], 7),
        ([(0, 2), (5, 7)], [(1, 6)], 2),
        ([], [(0, 5)], 0),
    ],
)
def test_computation_hides_communication(
    collectives: list[tuple[float, float]], computation: list[tuple[float, float]], expected: float
) -> None:
    assert seconds(exposed(collectives, computation)) == expected


@given(intervals, intervals)
def test_it_is_the_measure_of_the_difference(
    collectives: list[tuple[float, float]], computation: list[tuple[float, float]]
) -> None:
    def covered(parts: list[tuple[float, float]], second: int) -> bool:
        return any(begin <= second and second + 1 <= end for begin, end in parts)

    counted = sum(covered(collectives, s) and not covered(union(computation), s) for s in range(100))
    found = exposed(collectives, computation)
    assert seconds(found) == pytest.approx(counted)
    assert found == sorted(found)
    assert seconds(union(found)) == pytest.approx(counted), "they are disjoint"


def test_wrappers_are_neither_communication_nor_computation() -> None:
    trace = [
        ("gloo:all_reduce", 0.0, 4.0),
        ("ncclDevKernel_AllReduce_Sum_f32", 4.0, 5.0),
        ("c10d::allreduce_", 0.0, 1.0),
        ("record_param_comms", 0.0, 4.0),
        ("aten::mm", 1.0, 3.0),
    ]
    collectives, computation = classify(trace)
    assert len(collectives) == 2
    assert computation == [(1.0, 3.0)]
    assert exposed(collectives, computation) == [(0.0, 1.0), (3.0, 5.0)]


def test_waits_are_told_by_the_phase_they_are_in() -> None:
    spans = [Span("forward", 0, 4), Span("backward", 4, 8), Span("forward", 8, 10), Span("optimizer", 10, 12)]
    found = exposed_by_phase([(3, 5), (9, 9.5), (11, 14)], spans)
    assert found == {"forward": 1.5, "backward": 1, "optimizer": 1, "other": 2}


@given(intervals, st.lists(st.integers(0, 60), min_size=2, max_size=6))
def test_no_wait_is_lost_or_told_twice(waits: list[tuple[float, float]], bounds: list[int]) -> None:
    marks = sorted(bounds)
    spans = [Span("forward", begin, end) for begin, end in zip(marks, marks[1:], strict=False)]
    found = exposed_by_phase(union(waits), spans)
    assert sum(found.values()) == pytest.approx(seconds(union(waits)))


class FakeProfile:
    """A profiler whose start and stop take as long as they are told."""

    def __init__(self, clock: list[float], cost_s: float) -> None:
        self._clock, self._cost_s = clock, cost_s

    def start(self) -> None:
        self._clock[0] += self._cost_s

    def stop(self) -> None:
        self._clock[0] += self._cost_s

    @property
    def profiler(self) -> Any:
        return self

    kineto_results = property(lambda self: self)

    def events(self) -> list[Any]:
        return []


@pytest.mark.parametrize("budget", [0.005, 0.05])
def test_sampling_stays_within_its_share(budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("torch.profiler.profile", lambda **_: FakeProfile(clock, 0.4))
    sampler = CommunicationSampler(budget, cuda=False, clock=lambda: clock[0])
    sampler.on_start(0, 0)
    samples = 0
    for step in range(4_000):
        clock[0] += 5.0
        before = sampler.cost_s
        sampler.on_step(StepReport(step, 4_000))
        samples += sampler.cost_s > before
    assert samples >= 10
    assert sampler.cost_s <= budget * clock[0]
    assert sampler.shares == {"other": 0}


def test_another_profiler_at_work_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(**_: object) -> None:
        raise RuntimeError("profiler is already enabled")

    monkeypatch.setattr("torch.profiler.profile", busy)
    clock = [0.0]
    sampler = CommunicationSampler(0.5, cuda=False, clock=lambda: clock[0])
    for step in range(100):
        clock[0] += 1.0
        sampler.on_step(StepReport(step, 100))
    assert sampler.shares is None
    assert caplog.text.count("is not measured") == 1
    sampler.on_end()


def test_a_real_profiler_sees_real_collectives(tmp_path: Any) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        sampler = CommunicationSampler(0.9, cuda=False)
        sampler._next_cost_s = 0.0
        sampler.on_start(0, 10)
        values = torch.ones(1_000_000)
        clock = PhaseClock()
        for step in range(10):
            clock.begin()
            values = values @ torch.ones(1_000_000, 1) * torch.ones(1_000_000)
            clock.mark("forward")
            dist.all_reduce(values)
            clock.mark("backward")
            sampler.on_step(StepReport(step, 10, spans=tuple(clock.end())))
            if sampler.shares is not None:
                break
        sampler.on_end()
    finally:
        dist.destroy_process_group()
    assert sampler.shares is not None
    assert 0 < sampler.shares["backward"] <= 1
    assert sampler.shares["forward"] < 0.1 * sampler.shares["backward"], "trace and spans are on one clock"
