"""Guards on the loss: when to go back to the last good checkpoint, which data to skip, when to give up. Pure functions.

A spike is judged against the loss of the steps before it: its mean and mean deviation, both exponential averages
over about `window_steps`. A step that looks bad is not averaged in, so a spike cannot hide itself. Only
`patience_steps` bad steps in a row count: single outliers recover by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Verdict = Literal["good", "suspect", "roll back"]


@dataclass(frozen=True)
class GuardSettings:
    """When a loss counts as a spike.

    spike_deviations   above the mean by so many mean deviations, and
    spike_ratio        by this factor (a converged loss hardly varies: then deviations alone would be too sensitive)
    """

    spike_deviations: float = 8.0
    spike_ratio: float = 1.3
    patience_steps: int = 4
    window_steps: int = 64
    warmup_steps: int = 64
    max_rollbacks: int = 3


@dataclass(frozen=True)
class GuardState:
    """What the guard remembers: averages, steps averaged, and the bad steps in a row that led to now."""

    mean: float = 0.0
    deviation: float = 0.0
    count: int = 0
    bad_since: int | None = None
    bad_steps: int = 0


def observe(state: GuardState, step: int, loss: float, settings: GuardSettings) -> tuple[GuardState, Verdict]:
    """Returns the new state and the verdict on the loss of optimizer step `step` (NaN and infinity are bad at once)."""
    if _is_bad(state, loss, settings):
        since = step if state.bad_since is None else state.bad_since
        bad = replace(state, bad_since=since, bad_steps=state.bad_steps + 1)
        return bad, "roll back" if bad.bad_steps >= settings.patience_steps else "suspect"
    if state.count == 0:
        return GuardState(mean=loss, deviation=0.0, count=1), "good"
    weight = 1.0 / min(state.count + 1, settings.window_steps)
    return (
        GuardState(
            mean=state.mean + weight * (loss - state.mean),
            deviation=state.deviation + weight * (abs(loss - state.mean) - state.deviation),
            count=state.count + 1,
        ),
        "good",
    )


def _is_bad(state: GuardState, loss: float, settings: GuardSettings) -> bool:
    if not math.isfinite(loss):
        return True
    if state.count < settings.warmup_steps:
        return False
    limit = max(state.mean + settings.spike_deviations * state.deviation, state.mean * settings.spike_ratio)
    return loss > limit


@dataclass(frozen=True)
class Skip:
    """A stretch of the stream of sequences that is not trained on again.

    First <= position < stop (training/data/order.py).
    """

    first: int
    stop: int


@dataclass(frozen=True)
class Rollback:
    """Go back to the newest checkpoint of at most `at_most_step` and leave out the data in `skip`."""

    at_most_step: int
    skip: Skip
    reason: str


@dataclass(frozen=True)
class GiveUp:
    """The budget is used up; the run ends with this reason."""

    reason: str


def plan_rollback(
    state: GuardState, step: int, batches: Skip, rollbacks: int, settings: GuardSettings
) -> Rollback | GiveUp:
    """Returns what to do about a verdict "roll back" after step `step`.

    `batches` is the stretch that the steps from `state.bad_since` to `step` were trained on; `rollbacks` counts
    those that the run has made already.
    """
    since = state.bad_since if state.bad_since is not None else step
    reason = f"the loss was bad from step {since} to {step} (mean before: {state.mean:.3f})"
    if rollbacks >= settings.max_rollbacks:
        return GiveUp(f"{reason}, after {rollbacks} rollbacks (checkpoint.max_rollbacks)")
    return Rollback(since - 1, batches, reason)


def next_position(position: int, batch: int, skips: Sequence[Skip]) -> int:
    """Returns the first position, from `position` on, at which `batch` sequences touch nothing that is skipped."""
    for skip in sorted(skips, key=lambda skip: (skip.first, skip.stop)):
        if position < skip.stop and skip.first < position + batch:
            position = skip.stop
    return position


def health_alarms(
    token_correlation: float | None, perplexity_one: float | None, perplexity_mean: float | None
) -> list[str]:
    """Returns a line for each of the two failures that ended earlier runs of this architecture (arXiv 2502.05171, 4.3).

    token_correlation   mean correlation of token states after the recurrence: towards 1 all tokens become the same
    perplexity_one      at one iteration, against `perplexity_mean` at the mean count: equal means the state is ignored
    """
    alarms = []
    if token_correlation is not None and token_correlation > 0.95:
        alarms.append(f"token correlation after the recurrence is {token_correlation:.2f}: all tokens become the same")
    if perplexity_one is not None and perplexity_mean is not None and perplexity_one < 1.01 * perplexity_mean:
        alarms.append(
            f"perplexity with one iteration ({perplexity_one:.2f}) is that of the mean count ({perplexity_mean:.2f}): "
            "the model ignores the recurrence"
        )
    return alarms
