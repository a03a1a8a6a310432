"""Where a step's time goes: marks between data, forward, backward and optimizer, without waiting for the device.

On a CPU a mark is a look at the host's clock. On CUDA it is an event in the stream: the device notes the time when it
gets there, and the loop's own collective at the end of the step has waited for all of them when they are read. Time in
which the host waits for data while the device still works is therefore no data wait. Nothing is synchronised.
Imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

PHASES = ("data", "forward", "backward", "optimizer")


class Span(NamedTuple):
    """A stretch of a step."""

    phase: str
    begin: float
    """Unix time in seconds; on CUDA by the device's clock, laid on the host's at the beginning of the step."""
    end: float


class PhaseClock:
    """Marks of one step; outside of `begin` and `end` (an evaluation, a benchmark) marks are not taken.

    `new_event` makes an event that notes the time in the device stream (torch.cuda.Event(enable_timing=True)); without
    it the host's clock is looked at.
    """

    def __init__(self, new_event: Callable[[], Any] | None = None, clock: Callable[[], float] = time.time) -> None:
        self._new_event, self._clock = new_event, clock
        self._began_s = 0.0
        self._marks: list[tuple[str, Any]] = []
        self._events: list[Any] = []
        self._running = False

    def begin(self) -> None:
        """Begins a step. The device has nothing to do: the collective at the end of the step before was waited for."""
        self._running = True
        self._began_s = self._clock()
        self._marks = []
        self.mark("")

    def mark(self, phase: str) -> None:
        """Says that the time since the last mark was spent in `phase`."""
        if self._running:
            self._marks.append((phase, self._clock() if self._new_event is None else self._event(self._new_event)))

    def end(self) -> list[Span]:
        """Ends the step and returns its stretches in order; those that the device has not reached are left out."""
        self._running = False
        marks, self._marks = self._marks, []
        return _host_spans(marks) if self._new_event is None else self._device_spans(marks)

    def _event(self, new_event: Callable[[], Any]) -> Any:
        # Events are used again: making one costs more than recording it.
        index = len(self._marks)
        if index == len(self._events):
            self._events.append(new_event())
        event = self._events[index]
        event.record()
        return event

    def _device_spans(self, marks: Sequence[tuple[str, Any]]) -> list[Span]:
        spans: list[Span] = []
        begin_s = 0.0
        for phase, event in marks[1:]:
            if not event.query():
                break
            end_s = marks[0][1].elapsed_time(event) / 1000
            spans.append(Span(phase, self._began_s + begin_s, self._began_s + end_s))
            begin_s = end_s
        return spans


def _host_spans(marks: Sequence[tuple[str, float]]) -> list[Span]:
    times = [at for _, at in marks]
    return [Span(phase, begin, end) for (phase, end), begin in zip(marks[1:], times, strict=False)]


def seconds_by_phase(spans: Sequence[Span]) -> dict[str, float]:
    """Returns the sums over PHASES; a clock that was set back meanwhile counts for nothing."""
    sums = dict.fromkeys(PHASES, 0.0)
    for span in spans:
        sums[span.phase] += max(0.0, span.end - span.begin)
    return sums
