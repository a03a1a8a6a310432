"""Sums over the steps between two metrics records."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from training.records import MetricsRecord


@dataclass
class StepSample:
    """What one optimizer step measured."""

    loss: float
    grad_norm: float | None
    learning_rate: float
    iterations: int
    flop: float
    seconds: float
    tokens: int
    phase_s: dict[str, float] = field(default_factory=dict)
    stats: dict[str, float] = field(default_factory=dict)


class MetricsWindow:
    """Collects steps and turns them into a MetricsRecord."""

    def __init__(self, peak_flop_per_s: float | None) -> None:
        self._peak = peak_flop_per_s
        self._samples: list[StepSample] = []

    def add(self, sample: StepSample) -> None:
        """Adds one step."""
        self._samples.append(sample)

    def close(self, step: int, tokens: int) -> MetricsRecord:
        """Returns the record of the steps since the last one and begins anew."""
        samples, self._samples = self._samples, []
        seconds = sum(s.seconds for s in samples)
        flop_per_s = sum(s.flop for s in samples) / seconds
        stats = next((s.stats for s in reversed(samples) if s.stats), {})
        return MetricsRecord(
            time=time.time(),
            step=step,
            tokens=tokens,
            loss=_mean([s.loss for s in samples]),
            grad_norm=_mean([math.nan if s.grad_norm is None else s.grad_norm for s in samples]),
            learning_rate=samples[-1].learning_rate,
            recurrence=sum(s.iterations for s in samples) / len(samples),
            step_s=seconds / len(samples),
            data_wait_s=_mean_phase(samples, "data"),
            forward_s=_mean_phase(samples, "forward"),
            backward_s=_mean_phase(samples, "backward"),
            optimizer_s=_mean_phase(samples, "optimizer"),
            tokens_per_s=sum(s.tokens for s in samples) / seconds,
            flop_per_s=flop_per_s,
            mfu_ratio=None if self._peak is None else flop_per_s / self._peak,
            state_change_ratio=stats.get("relative_change"),
            token_correlation=stats.get("token_correlation"),
        )


def _mean_phase(samples: list[StepSample], phase: str) -> float:
    return sum(s.phase_s.get(phase, 0.0) for s in samples) / len(samples)


def _mean(values: list[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None
