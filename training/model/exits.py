"""Measures that tell when further iterations change nothing (arXiv 2502.05171, section 6.1).

    kl                 KL(previous || current) of the next-token distributions; the first previous one is uniform
    entropy-diff       |change of the entropy| of that distribution; the first previous one counts as 100 nats: no exit
    minp-kl            kl after probabilities below 0.1 of the largest are replaced by 1/V and all are renormalised
    argmax-stability   iterations for which the most likely token has not changed (exit when there are enough)
    latent-diff        |s_i - s_{i-1}| / |s_i|, mean over positions
    cosine             1 - cos(s_i, s_{i-1}), mean over positions

The first four need the coda and the head after each iteration; they look at the last position. The others need only
the state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Measure = Literal["kl", "entropy-diff", "minp-kl", "argmax-stability", "latent-diff", "cosine"]

THRESHOLDS: dict[Measure, float] = {
    "kl": 1e-3,
    "entropy-diff": 1e-3,
    "minp-kl": 1e-5,
    "argmax-stability": 5,
    "latent-diff": 0.03,
    "cosine": 1e-3,
}
MIN_P = 0.1
FIRST_ENTROPY = 100.0  # as in the reference


@dataclass(frozen=True)
class ExitRule:
    """Stop iterating when `measure` falls below `threshold` (argmax-stability: reaches it); None: the usual one."""

    measure: Measure = "kl"
    threshold: float | None = None
    min_iterations: int = 1

    @property
    def limit(self) -> float:
        """The threshold in force."""
        return THRESHOLDS[self.measure] if self.threshold is None else self.threshold

    @property
    def needs_logits(self) -> bool:
        """Whether coda and head have to run after each iteration."""
        return self.measure not in ("latent-diff", "cosine")

    def met(self, value: Tensor) -> bool:
        """Whether every sequence may stop at this value of the measure, [B]."""
        if self.measure == "argmax-stability":
            return bool((value >= self.limit).all())
        return bool((value < self.limit).all())


class ExitMeasure:
    """Follows one measure through the iterations of a forward."""

    def __init__(self, measure: Measure) -> None:
        self.measure = measure
        self._previous: Tensor | None = None
        self._unchanged: Tensor | None = None

    def update(self, state: Tensor, previous_state: Tensor, logits: Tensor | None = None) -> Tensor:
        """Returns the measure [B] after an iteration from previous_state to state [B, T, C].

        logits [B, V] of the last position are needed by the measures that look at the next token.
        """
        if self.measure == "latent-diff":
            return latent_difference(state, previous_state)
        if self.measure == "cosine":
            return cosine_distance(state, previous_state)
        assert logits is not None, f"exit measure {self.measure} needs logits"
        if self.measure == "argmax-stability":
            return self._stability(logits.argmax(-1))
        log_probs = F.log_softmax(logits.float(), dim=-1)
        if self.measure == "minp-kl":
            log_probs = filter_min_p(log_probs)
        before, self._previous = self._previous, log_probs
        if self.measure == "entropy-diff":
            return (entropy(log_probs) - (FIRST_ENTROPY if before is None else entropy(before))).abs()
        uniform = torch.full_like(log_probs, -math.log(logits.shape[-1]))
        return kl_divergence(uniform if before is None else before, log_probs)

    def _stability(self, best: Tensor) -> Tensor:
        same = torch.zeros_like(best) if self._previous is None else (best == self._previous).long()
        self._unchanged = same if self._unchanged is None else (self._unchanged + 1) * same
        self._previous = best
        return self._unchanged


def entropy(log_probs: Tensor) -> Tensor:
    """Entropy in nats over the last axis."""
    return -(log_probs.exp() * log_probs).sum(-1)


def kl_divergence(first: Tensor, second: Tensor) -> Tensor:
    """KL(first || second) in nats of two log-probability tensors, over the last axis."""
    return (first.exp() * (first - second)).sum(-1)


def filter_min_p(log_probs: Tensor) -> Tensor:
    """Log-probabilities after those below MIN_P of the largest became 1/V and all were renormalised."""
    probs = log_probs.exp()
    kept = probs >= MIN_P * probs.amax(-1, keepdim=True)
    probs = torch.where(kept, probs, torch.full_like(probs, 1 / probs.shape[-1]))
    return (probs / probs.sum(-1, keepdim=True)).log()


def latent_difference(state: Tensor, previous: Tensor) -> Tensor:
    """|s_i - s_{i-1}| / |s_i|, mean over positions: [B, T, C] to [B]."""
    state, previous = state.float(), previous.float()
    return ((state - previous).norm(dim=-1) / state.norm(dim=-1)).mean(-1)


def cosine_distance(state: Tensor, previous: Tensor) -> Tensor:
    """1 - cos(s_i, s_{i-1}), mean over positions: [B, T, C] to [B]."""
    return (1 - F.cosine_similarity(state.float(), previous.float(), dim=-1)).mean(-1)
