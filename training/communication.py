"""Exposed communication: the time of collectives that no computation covers, sampled with torch.profiler.

One step is profiled, and from its trace the union of all computation is taken away from the union of all collectives:
on a GPU kernels against NCCL kernels, on a CPU operators against gloo's. What is left is time the device waited for the
network, or for a rank that came late. A collective that runs under a backward pass counts for nothing. The spans of the
step (training/phases.py), which are on the same clock as the trace, say in which phase it waited.

What a sample costs (starting and stopping the profiler, the slower step) decides when the next one is due, so that
sampling stays within the share of the run's time that monitoring.communication_sampling allows.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from training.callbacks import StepReport
from training.phases import Span

log = logging.getLogger("training")

Interval = tuple[float, float]
"""Begin and end, in seconds."""

# The profiler's first start takes seconds (its libraries are loaded); later ones take milliseconds.
ASSUMED_SAMPLE_COST_S = 2.0
KEPT_SAMPLES = 5
# A span much longer than a step held an evaluation or a save, and says nothing about the step.
LONGEST_SAMPLE_STEPS = 4.0
_COLLECTIVES = ("nccl", "gloo:", "mpi:")
# Wrappers that only hand a collective over; they are neither it nor computation.
_WRAPPERS = ("c10d::", "record_param_comms", "ProfilerStep", "torch.distributed")


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns disjoint intervals, sorted, that cover the same points."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def exposed(collectives: Iterable[Interval], computation: Iterable[Interval]) -> list[Interval]:
    """Returns the disjoint intervals, sorted, that are covered by a collective and by no computation."""
    busy, found, index = union(computation), [], 0
    for begin, end in union(collectives):
        while index < len(busy) and busy[index][1] <= begin:
            index += 1
        left = begin
        for start, stop in busy[index:]:
            if start >= end:
                break
            if start > left:
                found.append((left, start))
            left = max(left, stop)
        if left < end:
            found.append((left, end))
    return found


def exposed_by_phase(waits: Sequence[Interval], spans: Sequence[Span]) -> dict[str, float]:
    """Returns the seconds of disjoint `waits` in each phase of a step; those in none of its spans are `other`."""
    sums: dict[str, float] = {}
    for span in spans:
        inside = sum(max(0.0, min(end, span.end) - max(begin, span.begin)) for begin, end in waits)
        sums[span.phase] = sums.get(span.phase, 0.0) + inside
    total = sum(end - begin for begin, end in waits)
    return {**sums, "other": max(0.0, total - sum(sums.values()))}


def classify(events: Sequence[tuple[str, float, float]]) -> tuple[list[Interval], list[Interval]]:
    """Splits (name, begin, end) of a trace into collectives and computation."""
    collectives = [(a, b) for name, a, b in events if name.lower().startswith(_COLLECTIVES)]
    computation = [
        (a, b) for name, a, b in events if not name.lower().startswith(_COLLECTIVES) and not name.startswith(_WRAPPERS)
    ]
    return collectives, computation


class CommunicationSampler:
    """Callback that profiles a step now and then; `shares` are the exposed shares of the last samples."""

    def __init__(self, budget_ratio: float, *, cuda: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self._budget, self._cuda, self._clock = budget_ratio, cuda, clock
        self._samples: deque[dict[str, float]] = deque(maxlen=KEPT_SAMPLES)
        self._steps_s: deque[float] = deque(maxlen=16)
        self._profile: Any = None
        self._began = self._last = clock()
        self._start_cost_s = 0.0
        self.cost_s = 0.0
        self._next_cost_s = ASSUMED_SAMPLE_COST_S

    @property
    def shares(self) -> dict[str, float] | None:
        """Exposed seconds by phase over all seconds of the last sampled steps; None before the first sample."""
        samples = list(self._samples)
        if not samples:
            return None
        phases = {phase for sample in samples for phase in sample}
        return {phase: statistics.fmean(sample.get(phase, 0.0) for sample in samples) for phase in sorted(phases)}

    def on_start(self, step: int, total_steps: int) -> None:
        """Begins to count."""
        self._began = self._last = self._clock()

    def on_step(self, report: StepReport) -> None:
        """Ends the sample of the step just done, or begins one for the next step."""
        now = self._clock()
        if self._profile is not None:
            self._finish(now, report.spans)
        else:
            self._steps_s.append(now - self._last)
            if self._due(now):
                self._start()
        self._last = self._clock()

    def on_message(self, text: str) -> None:
        """Nothing to do."""

    def on_end(self) -> None:
        """Drops a sample that has not ended."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _due(self, now: float) -> bool:
        # The first steps warm up; a sample of them would tell of compilation.
        warm = len(self._steps_s) > 2
        return warm and (now - self._began) * self._budget >= self.cost_s + self._next_cost_s

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        began = self._clock()
        try:
            activity = ProfilerActivity.CUDA if self._cuda else ProfilerActivity.CPU
            self._profile = profile(activities=[activity], acc_events=True)
            self._profile.start()
        except RuntimeError as error:
            # For example another profiler that is at work; training matters more than this number.
            log.warning("exposed communication is not measured: %s", error)
            self._profile, self._budget = None, 0.0
            self._next_cost_s = ASSUMED_SAMPLE_COST_S
        self._start_cost_s = self._clock() - began

    def _finish(self, now: float, spans: Sequence[Span]) -> None:
        profile, self._profile = self._profile, None
        profile.stop()
        events = profile.profiler.kineto_results.events()
        step_s, usual_s = now - self._last, statistics.median(self._steps_s)
        if step_s < LONGEST_SAMPLE_STEPS * usual_s:
            trace = [(e.name(), e.start_ns() * 1e-9, (e.start_ns() + e.duration_ns()) * 1e-9) for e in events]
            seconds = exposed_by_phase(exposed(*classify(trace)), spans)
            whole_s = max(step_s, sum(seconds.values()))
            self._samples.append({phase: part / whole_s for phase, part in seconds.items()})
        self._next_cost_s = self._start_cost_s + self._clock() - now + max(0.0, step_s - usual_s)
        self.cost_s += self._next_cost_s
