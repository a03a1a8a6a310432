"""How many core iterations a micro-batch runs: a pure function of seed and step.

All ranks and every restart draw the same counts without talking, because nothing but (seed, global step, micro step)
goes in. The raw Philox stream and the arithmetic below do not depend on the version of a random library, so nodes
with different software agree as well. Torch-free: the plan on the control side uses the expected counts.

Schemes (arXiv 2502.05171, section 3.3; rbar = mean_recurrence, k_max = backprop_depth):
  lognormal-poisson   tau ~ Normal(ln rbar - sigma^2/2, sigma), p = Poisson(exp tau) + 1,
                      n = max(p - k_max, 0), k = min(k_max, p)
  poisson             n ~ Poisson(rbar - k_max), k = k_max
  fixed               n = rbar - k_max, k = k_max
With k_max > rbar the last two run rbar iterations, all with gradient.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from training.config.schema import ModelSection

SIGMA = 0.5  # spread of ln(recurrence) in the reference
_STREAM = 0x5EC0  # keeps these draws apart from anything else keyed by the same seed
_UINT64 = 2**64
_QUADRATURE_POINTS = 400


class RecurrenceSampler:
    """Draws (iterations without gradient, iterations with gradient) for a micro-batch."""

    def __init__(self, config: ModelSection) -> None:
        self.scheme = config.recurrence_sampling
        self.mean_recurrence = config.mean_recurrence
        self.backprop_depth = config.backprop_depth

    def draw(self, seed: int, global_step: int, micro_step: int) -> tuple[int, int]:
        """Returns (n_no_grad, k_grad), k_grad >= 1, for micro-batch `micro_step` of optimizer step `global_step`."""
        u_normal, u_poisson = _uniforms(seed, global_step, micro_step)
        if self.scheme == "lognormal-poisson":
            total = _poisson_quantile(self._rate(u_normal), u_poisson) + 1
            return max(total - self.backprop_depth, 0), min(self.backprop_depth, total)
        k_grad = min(self.backprop_depth, self.mean_recurrence)
        surplus = self.mean_recurrence - k_grad
        n_no_grad = _poisson_quantile(surplus, u_poisson) if self.scheme == "poisson" else surplus
        return n_no_grad, k_grad

    def mean_steps(self) -> tuple[float, float]:
        """Returns the expected (n_no_grad, k_grad), for plans of time and memory."""
        k_grad = float(min(self.backprop_depth, self.mean_recurrence))
        if self.scheme != "lognormal-poisson":
            return self.mean_recurrence - k_grad, k_grad
        points = [(i + 0.5) / _QUADRATURE_POINTS for i in range(_QUADRATURE_POINTS)]
        mean_k = sum(_mean_capped(self._rate(u), self.backprop_depth) for u in points) / len(points)
        return self.mean_recurrence + 1 - mean_k, mean_k

    def _rate(self, u: float) -> float:
        """Quantile `u` of the log-normal rate whose mean is mean_recurrence."""
        return math.exp(NormalDist(math.log(self.mean_recurrence) - SIGMA**2 / 2, SIGMA).inv_cdf(u))


def _uniforms(seed: int, global_step: int, micro_step: int) -> tuple[float, float]:
    """Two independent uniforms in (0, 1), keyed by the arguments alone."""
    bits = np.random.Philox(
        key=np.array([seed % _UINT64, _STREAM], dtype=np.uint64),
        counter=np.array([0, 0, micro_step, global_step], dtype=np.uint64),
    ).random_raw(2)
    first, second = ((int(b) >> 11) + 0.5 for b in bits)
    return first / 2**53, second / 2**53


def _poisson_quantile(rate: float, u: float) -> int:
    """Smallest count whose Poisson(rate) distribution function reaches `u` (inversion; the rates here are small)."""
    if rate <= 0:
        return 0
    count, cumulative = 0, math.exp(-rate)
    limit = int(rate + 40 * math.sqrt(rate) + 40)  # beyond it the tail is below rounding
    while cumulative < u and count < limit:
        count += 1
        cumulative += math.exp(count * math.log(rate) - rate - math.lgamma(count + 1))
    return count


def _mean_capped(rate: float, cap: int) -> float:
    """Expectation of min(cap, Poisson(rate) + 1), as the sum over j >= 1 of P(value >= j)."""
    below, mean = 0.0, 0.0
    for j in range(cap):
        mean += 1.0 - below
        below += math.exp(j * math.log(rate) - rate - math.lgamma(j + 1))
    return mean
