"""Generation: cache, sampling, adaptive exit, shared caches, warm start."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.config.schema import ModelSection
from training.errors import UsageError
from training.golden import load_fixture
from training.model.cache import DecodingCache
from training.model.exits import THRESHOLDS, ExitMeasure, ExitRule
from training.model.generate import choose_token, generate, stream
from training.model.recurrent import RecurrentLM

GOLDEN = Path(__file__).parents[2] / "golden"
PROMPT = [3, 17, 5]


@pytest.fixture(scope="module")
def model() -> RecurrentLM:
    return load_fixture(GOLDEN / "tiny_a").model


def test_cache_gives_what_full_recomputation_gives(model: RecurrentLM) -> None:
    steps = list(stream(model, PROMPT, 6, recurrence=3, state_scale=0.0))
    tokens = [*PROMPT, *(step.token for step in steps)]
    with torch.no_grad():
        logits = model(torch.tensor([tokens[:-1]]), steps=(3, 0), state_scale=0.0).logits[0]
    torch.testing.assert_close(
        torch.stack([step.logits for step in steps]), logits[len(PROMPT) - 1 :], atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_bfloat16_generates(how: str) -> None:
    built = load_fixture(GOLDEN / "tiny_a").model
    if how == "weights":
        result = generate(built.bfloat16(), PROMPT, 4, recurrence=4, exit=ExitRule("kl", threshold=0.1))
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = generate(built, PROMPT, 4, recurrence=4, exit=ExitRule("kl", threshold=0.1))
    assert len(result.tokens) == 4


def test_generate_collects_the_stream(model: RecurrentLM) -> None:
    result = generate(model, torch.tensor([PROMPT]), 5, recurrence=4)
    steps = list(stream(model, PROMPT, 5, recurrence=4))
    assert result.tokens == [step.token for step in steps]
    assert result.iterations_per_token == [4] * 5


def test_recurrence_defaults_to_the_mean_of_training(model: RecurrentLM) -> None:
    assert generate(model, PROMPT, 2).iterations_per_token == [8, 8]


def test_sampling_follows_its_seed(model: RecurrentLM) -> None:
    texts = [generate(model, PROMPT, 8, recurrence=2, temperature=1.5, seed=seed).tokens for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_top_k_keeps_the_most_likely(model: RecurrentLM) -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.9])
    generator = torch.Generator().manual_seed(0)
    assert {choose_token(logits, 5.0, 2, generator) for _ in range(60)} == {1, 3}
    assert {choose_token(logits, 0.0, None, generator) for _ in range(5)} == {1}


def test_a_stop_token_ends_the_text(model: RecurrentLM) -> None:
    whole = generate(model, PROMPT, 6, recurrence=2).tokens
    assert generate(model, PROMPT, 6, recurrence=2, stop_tokens=[whole[2]]).tokens == whole[: whole.index(whole[2]) + 1]


@pytest.mark.parametrize("measure", sorted(THRESHOLDS))
def test_exits_save_iterations_where_the_model_settles(model: RecurrentLM, measure: str) -> None:
    rule = ExitRule(measure, min_iterations=2)
    result = generate(model, PROMPT, 6, recurrence=40, state_scale=0.0, exit=rule)
    assert result.iterations_per_token[0] == 40  # the prompt runs them all
    assert all(2 <= count < 40 for count in result.iterations_per_token[1:])


def test_a_threshold_that_is_never_met_changes_nothing(model: RecurrentLM) -> None:
    assert generate(model, PROMPT, 4, recurrence=5, exit=ExitRule("kl", threshold=-1.0)) == generate(
        model, PROMPT, 4, recurrence=5
    )


def test_min_iterations_hold(model: RecurrentLM) -> None:
    rule = ExitRule("latent-diff", threshold=1e9, min_iterations=3)
    assert generate(model, PROMPT, 4, recurrence=9, exit=rule).iterations_per_token == [9, 3, 3, 3]


@settings(max_examples=40, deadline=None)
@given(
    depths=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    budget=st.one_of(st.none(), st.integers(1, 5)),
    iteration=st.integers(0, 6),
)
def test_cache_reads_the_deepest_iteration_that_a_token_has(
    depths: list[int], budget: int | None, iteration: int
) -> None:
    """Every key holds the iteration that wrote it; the expected one is found by replaying all writes."""
    config = ModelSection(preset=None, width=4, heads=2, mlp_width=4, core_layers=1, vocab_size=5, context_length=8)
    cache = DecodingCache(config, 8, 7, budget, torch.zeros(1))
    slots = min(budget or 7, 7)
    written: list[dict[int, int]] = []
    for depth in depths:
        for i in range(depth):
            value = torch.full((1, 2, 1, 2), float(i))
            cache.core(i)[0].extend(value, -value)
        cache.finish(1, depth)
        written.append({i % slots: i for i in range(depth)})
    new = torch.full((1, 2, 1, 2), 100.0)
    keys, values = cache.core(iteration)[0].extend(new, -new)
    wanted = iteration % slots
    expected = [slot.get(wanted, slot[max(slot)]) for slot in written]
    assert keys[0, 0, :, 0].tolist() == [*map(float, expected), 100.0]
    assert torch.equal(values, -keys)


def test_a_budget_bounds_the_memory(model: RecurrentLM) -> None:
    like = torch.zeros(1)
    shared, shallow = DecodingCache(model.config, 16, 32, 4, like), DecodingCache(model.config, 16, 4, None, like)
    assert shared.bytes() == shallow.bytes() < DecodingCache(model.config, 16, 32, None, like).bytes() / 4


def test_a_budget_of_all_iterations_shares_nothing(model: RecurrentLM) -> None:
    assert generate(model, PROMPT, 6, recurrence=4, kv_budget=4) == generate(model, PROMPT, 6, recurrence=4)
    assert generate(model, PROMPT, 6, recurrence=4, kv_budget=1) != generate(model, PROMPT, 6, recurrence=4)


@pytest.mark.parametrize("tokens", [61, 1000])
def test_a_text_longer_than_the_context_is_refused(model: RecurrentLM, tokens: int) -> None:
    generate(model, PROMPT, 1, recurrence=1)
    with pytest.raises(UsageError, match="at most 61 new tokens" if tokens > 61 else "0 new"):
        generate(model, PROMPT if tokens > 61 else [1] * 64, tokens, recurrence=1)


@pytest.mark.parametrize("bad", [{"recurrence": 0}, {"kv_budget": 0}, {"prompt_ids": []}])
def test_impossible_requests_are_refused(model: RecurrentLM, bad: dict) -> None:
    with pytest.raises(UsageError):
        generate(model, **{"prompt_ids": PROMPT, "max_new_tokens": 1, **bad})


def test_state_measures_need_no_logits() -> None:
    state = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    assert ExitMeasure("latent-diff").update(state, torch.zeros_like(state)).tolist() == pytest.approx([1.0, 1.0])
    assert ExitMeasure("cosine").update(state, 2 * state).tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    with pytest.raises(AssertionError, match="needs logits"):
        ExitMeasure("kl").update(state, state)
