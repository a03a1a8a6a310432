"""The clock of a step's phases: what it adds up to, and that it never waits for a device."""

from __future__ import annotations

import time

import pytest

from training.metrics_window import MetricsWindow, StepSample
from training.phases import PhaseClock, Span, seconds_by_phase


class Device:
    """A stream that gets to its events `late_s` after the host has recorded them; `reached` says which are done."""

    def __init__(self, clock: list[float], late_s: float = 0.0, reached: bool = True) -> None:
        self.clock, self.late_s, self.reached, self.made = clock, late_s, reached, 0

    def event(self) -> Event:
        self.made += 1
        return Event(self)


class Event:
    """Stands in for torch.cuda.Event; synchronising would be an error."""

    def __init__(self, device: Device) -> None:
        self.device, self.at = device, 0.0

    def record(self) -> None:
        self.at = self.device.clock[0] + self.device.late_s

    def query(self) -> bool:
        return self.device.reached

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1000


def step(clock: PhaseClock, now: list[float]) -> None:
    clock.begin()
    for phase, seconds in (("data", 1), ("forward", 2), ("backward", 4), ("data", 1), ("forward", 2), ("backward", 4)):
        now[0] += seconds
        clock.mark(phase)
    now[0] += 3
    clock.mark("optimizer")
    now[0] += 5  # the collective about the loss: none of the phases


def test_a_host_step_adds_up() -> None:
    now = [100.0]
    clock = PhaseClock(clock=lambda: now[0])
    step(clock, now)
    spans = clock.end()
    assert spans[0] == Span("data", 100, 101)
    assert spans[-1] == Span("optimizer", 114, 117)
    assert seconds_by_phase(spans) == {"data": 2, "forward": 4, "backward": 8, "optimizer": 3}


def test_a_device_step_is_told_by_its_events_and_they_are_used_again() -> None:
    now = [100.0]
    device = Device(now)
    clock = PhaseClock(device.event, lambda: now[0])
    for _ in range(3):
        begin = now[0]
        step(clock, now)
        spans = clock.end()
        assert spans[0].begin == begin
        assert seconds_by_phase(spans) == pytest.approx({"data": 2, "forward": 4, "backward": 8, "optimizer": 3})
    assert device.made == 8


def test_what_the_device_has_not_reached_is_left_out() -> None:
    now = [0.0]
    clock = PhaseClock(Device(now, reached=False).event, lambda: now[0])
    step(clock, now)
    assert clock.end() == []


def test_marks_outside_of_a_step_are_not_taken() -> None:
    clock = PhaseClock()
    clock.mark("forward")
    assert clock.end() == []
    clock.begin()
    clock.end()
    clock.mark("forward")
    assert clock.end() == []


def test_a_clock_that_was_set_back_counts_for_nothing() -> None:
    assert seconds_by_phase([Span("forward", 5, 3), Span("backward", 3, 4)])["forward"] == 0


def test_marks_cost_next_to_nothing() -> None:
    clock = PhaseClock()
    began = time.perf_counter()
    for _ in range(1000):
        step(clock, [0.0])
        seconds_by_phase(clock.end())
    assert (time.perf_counter() - began) / 1000 < 0.5e-3


def test_the_window_means_them() -> None:
    window = MetricsWindow(None)
    for forward in (1.0, 3.0):
        phases = {"data": 0.5, "forward": forward, "backward": 4.0, "optimizer": 0.25}
        window.add(StepSample(2.0, 1.0, 1e-3, 4, 1e9, 10.0, 100, phase_s=phases))
    record = window.close(2, 200)
    assert (record.data_wait_s, record.forward_s, record.backward_s, record.optimizer_s) == (0.5, 2.0, 4.0, 0.25)
