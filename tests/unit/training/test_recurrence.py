"""How many iterations a micro-batch runs: the reference's distribution, and nothing but seed and step in it."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.config.schema import ModelSection
from training.model.sampler import RecurrenceSampler

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "recurrence_sampling.json").read_text())
SCHEMES = ["lognormal-poisson", "poisson", "fixed"]


def sampler(mean: int, depth: int, scheme: str = "lognormal-poisson") -> RecurrenceSampler:
    return RecurrenceSampler(
        ModelSection(preset=None, mean_recurrence=mean, backprop_depth=depth, recurrence_sampling=scheme)
    )


def draws(mean: int, depth: int, scheme: str, count: int = 10_000) -> np.ndarray:
    source = sampler(mean, depth, scheme)
    return np.array([source.draw(42, step, 0) for step in range(count)])


@pytest.mark.parametrize(
    ("key", "mean", "depth", "scheme"),
    [
        ("poisson-lognormal-filling/mean32/backprop8", 32, 8, "lognormal-poisson"),
        ("poisson-lognormal-filling/mean8/backprop4", 8, 4, "lognormal-poisson"),
        ("poisson-lognormal-filling/mean4/backprop2", 4, 2, "lognormal-poisson"),
        ("poisson-fill/mean32/backprop8", 32, 8, "poisson"),
        ("fixed/mean32/backprop8", 32, 8, "fixed"),
    ],
)
def test_distribution_is_the_references(key: str, mean: int, depth: int, scheme: str) -> None:
    expected, sample = GOLDEN[key], draws(mean, depth, scheme)
    for name, values in (("total_r", sample.sum(1)), ("no_grad_n", sample[:, 0]), ("with_grad_k", sample[:, 1])):
        moments = expected[name]
        # Five standard errors of a mean of 10,000 draws, the same again for the reference's own.
        assert values.mean() == pytest.approx(moments["mean"], abs=1e-9 + 0.1 * moments["std"])
        # k is below the depth in one draw of a hundred: its spread is that of rare events.
        assert values.std() == pytest.approx(moments["std"], rel=0.15 if name == "with_grad_k" else 0.05)
        # Neighbouring integers at a percentile are chance.
        assert np.percentile(values, [5, 50, 95]) == pytest.approx(
            [moments[p] for p in ("p05", "median", "p95")], abs=1.01
        )
    if "frac_n_zero" in expected:
        assert (sample[:, 0] == 0).mean() == pytest.approx(expected["frac_n_zero"], abs=0.02)
        assert (sample[:, 1] == depth).mean() == pytest.approx(expected["frac_k_equals_backprop_depth"], abs=0.01)


@given(
    seed=st.integers(0, 2**63),
    step=st.integers(0, 10**9),
    micro=st.integers(0, 4096),
    mean=st.integers(1, 64),
    depth=st.integers(1, 64),
    scheme=st.sampled_from(SCHEMES),
)
def test_a_draw_depends_on_seed_and_step_alone(
    seed: int, step: int, micro: int, mean: int, depth: int, scheme: str
) -> None:
    first = sampler(mean, depth, scheme)
    expected = first.draw(seed, step, micro)
    for other in range(3):
        first.draw(seed + 1, other, micro)  # earlier draws leave no trace
    assert first.draw(seed, step, micro) == sampler(mean, depth, scheme).draw(seed, step, micro) == expected
    n_no_grad, k_grad = expected
    assert n_no_grad >= 0 and 1 <= k_grad <= depth
    if n_no_grad > 0:
        assert k_grad == depth


@pytest.mark.parametrize("other", [(8, 100, 0), (7, 101, 0), (7, 100, 1)])
def test_every_part_of_the_key_matters(other: tuple[int, int, int]) -> None:
    source = sampler(32, 8)
    steps = range(0, 4000, 200)
    first = [source.draw(7, 100 + step, 0) for step in steps]
    assert first != [source.draw(other[0], other[1] + step, other[2]) for step in steps]


def test_draws_are_fixed_for_good() -> None:
    """A change of these numbers changes every run that is resumed, and ranks with old and new code would disagree."""
    source = sampler(32, 8)
    assert [source.draw(42, step, 0) for step in range(6)] == [(11, 8), (19, 8), (7, 8), (23, 8), (45, 8), (36, 8)]


@pytest.mark.parametrize(("mean", "depth"), [(32, 8), (8, 4), (4, 2), (2, 8), (1, 1)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_expected_steps_are_those_of_the_draws(mean: int, depth: int, scheme: str) -> None:
    n_no_grad, k_grad = sampler(mean, depth, scheme).mean_steps()
    sample = draws(mean, depth, scheme, 5_000)
    assert sample[:, 0].mean() == pytest.approx(n_no_grad, abs=0.02 + 0.03 * mean)
    assert sample[:, 1].mean() == pytest.approx(k_grad, abs=0.06)


def test_large_means_do_not_underflow() -> None:
    assert draws(5000, 8, "poisson", 50).sum(1).mean() == pytest.approx(5000, rel=0.02)
