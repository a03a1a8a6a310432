"""Structure, initial weights, types, gradients and compilation of the recurrent model."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch._dynamo.utils import counters

from training.config.presets import PRESETS
from training.config.schema import ModelSection
from training.golden import load_fixture
from training.model.blocks import RotaryTable, apply_rotary, causal_attention
from training.model.init import init_weights, initial_std
from training.model.recurrent import RecurrentLM, compile_blocks
from training.model.state import draw_state, token_correlation
from training.model.vocab import linear_cross_entropy
from training.model_size import count_parameters

GOLDEN = Path(__file__).parents[2] / "golden"

SMALL = ModelSection(
    preset=None,
    vocab_size=67,
    context_length=24,
    width=32,
    heads=2,
    mlp_width=48,
    prelude_layers=2,
    core_layers=2,
    coda_layers=1,
    mean_recurrence=4,
    backprop_depth=2,
)


@pytest.fixture
def model() -> RecurrentLM:
    built = RecurrentLM(SMALL)
    init_weights(built, SMALL, seed=1)
    return built


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 67, (3, 16), generator=torch.Generator().manual_seed(5))


def gradients(model: RecurrentLM, tokens: Tensor, **forward: object) -> dict[str, Tensor]:
    model.zero_grad()
    model(tokens, tokens.roll(-1, 1), generator_key=(1, 2, 3, 4), **forward).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_exactly(preset: str, tied: bool) -> None:
    config = ModelSection(preset=preset, tie_embeddings=tied, qk_bias=tied)
    with torch.device("meta"):
        built = RecurrentLM(config)
    init_weights(built, config, seed=0)
    size = count_parameters(config)
    assert size.total == sum(p.numel() for p in built.parameters())
    core = [*built.transformer["adapter"].parameters(), *built.transformer["core_block"].parameters()]
    assert size.core == sum(p.numel() for p in core)


def test_the_reference_has_its_size() -> None:
    size = count_parameters(ModelSection(preset="huginn-3.5b"))
    assert (size.total, size.core_blocks) == (3_564_976_800, 1_581_592_320)


@pytest.mark.parametrize("name", ["tiny_a", "tiny_c"])
def test_names_are_those_of_the_reference(name: str) -> None:
    weights = load_file(GOLDEN / f"{name}.weights.safetensors")
    assert set(load_fixture(GOLDEN / name).model.state_dict()) == weights.keys() - {"freqs_cis"}


def test_a_tied_head_in_a_checkpoint_is_accepted(model: RecurrentLM) -> None:
    state = model.state_dict()
    state["lm_head.weight"], state["freqs_cis"] = state["transformer.wte.weight"], torch.zeros(1)
    model.load_state_dict(state)
    with pytest.raises(RuntimeError, match="unknown"):
        model.load_state_dict({**state, "unknown": torch.zeros(1)})


def test_initial_weights_follow_the_seed_and_the_formula(model: RecurrentLM) -> None:
    again, other = RecurrentLM(SMALL), RecurrentLM(SMALL)
    init_weights(again, SMALL, seed=1)
    init_weights(other, SMALL, seed=2)
    for (name, p), q, r in zip(model.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        std = initial_std(name, SMALL)
        if std is None:
            assert p.unique().tolist() == [0.0 if "qk_bias" in name else 1.0]
        else:
            assert not torch.equal(p, r)
            assert p.std().item() == pytest.approx(std, rel=0.1)
            assert p.abs().max().item() <= 3 * std * (1 + 1e-6)


def test_initial_std_counts_the_mean_recurrence() -> None:
    huginn = ModelSection(preset="huginn-3.5b")
    assert initial_std("transformer.wte.weight", huginn) == pytest.approx(0.008704, rel=1e-3)
    assert initial_std("transformer.coda.0.mlp.proj.weight", huginn) == pytest.approx(
        0.008704 / math.sqrt(2 * 132), rel=1e-3
    )


def test_rotary_table_stays_float32_and_follows_the_device(model: RecurrentLM) -> None:
    before = model.rotary.table.clone()
    model.bfloat16()
    assert model.transformer["wte"].weight.dtype == torch.bfloat16
    assert torch.equal(model.rotary.table, before)
    with torch.device("meta"):
        empty = RecurrentLM(SMALL)
    assert torch.equal(empty.to_empty(device="cpu").rotary.table, before)


def test_rotary_has_one_meaning_compiled_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 6, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    rotary = RotaryTable(6, 8, 50000.0)(6)
    eager = apply_rotary(x, rotary)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(apply_rotary(x, rotary), eager)
    torch.testing.assert_close(eager.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(eager[:, 0], x[:, 0])  # position 0 is not turned


def test_bfloat16_attention_on_a_processor_is_the_fused_one() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 20, 16, generator=generator).bfloat16().requires_grad_() for _ in range(3))
    ours, fused = causal_attention(q, k, v), F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(ours, fused, atol=3e-2, rtol=0)
    upstream = torch.randn(ours.shape, generator=generator).bfloat16()
    for a, b in zip(*(torch.autograd.grad(out, (q, k, v), upstream) for out in (ours, fused)), strict=True):
        torch.testing.assert_close(a, b, atol=6e-2, rtol=0)


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 9), chunk=st.integers(1, 10), ignored=st.sets(st.integers(0, 8)), seed=st.integers(0, 99))
def test_chunked_cross_entropy_is_cross_entropy(rows: int, chunk: int, ignored: set[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 4, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(7, 4, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.randint(0, 7, (rows,), generator=generator)
    labels[[i for i in ignored if i < rows]] = -100
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk) * 3
    expected = F.cross_entropy(hidden @ weight.t(), labels, reduction="sum") / max(1, int((labels != -100).sum())) * 3
    torch.testing.assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)
    ours, theirs = (torch.autograd.grad(x, (hidden, weight)) for x in (loss, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_loss_gradients_survive_float16() -> None:
    """A mean over 4096 tokens makes gradients that float16 rounds to zero; the loss scale must reach them first."""
    hidden = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0)).half().requires_grad_()
    weight = (0.1 * torch.randn(5, 8, generator=torch.Generator().manual_seed(1))).half().requires_grad_()
    labels = torch.zeros(4096, dtype=torch.long)
    scale = 2.0**16
    (grad,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels) * scale, (hidden,))
    exact = torch.autograd.grad(F.cross_entropy(hidden.float() @ weight.float().t(), labels), (hidden,))[0].float()
    assert grad.float().norm().item() / scale == pytest.approx(exact.norm().item(), rel=1e-2)


def test_checkpointing_changes_no_gradient(model: RecurrentLM, tokens: Tensor) -> None:
    plain = gradients(model, tokens, steps=(1, 3))
    model.activation_checkpointing = True
    for name, grad in gradients(model, tokens, steps=(1, 3)).items():
        assert torch.equal(grad, plain[name]), name


def test_every_parameter_gets_a_gradient(model: RecurrentLM, tokens: Tensor) -> None:
    # One prelude injection is enough; qk biases of position 0 alone would get none.
    for name, grad in gradients(model, tokens, steps=(2, 1)).items():
        assert grad.abs().max() > 0, name


def test_autocast_gradients_are_right_after_iterations_without_gradient() -> None:
    """Casts cached without gradient must not be used again in the graded iterations."""
    fixture = load_fixture(GOLDEN / "tiny_a")
    golden, norms = fixture.golden, fixture.description["grads"]["n2_k4"]["norms"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = fixture.model(
            golden["input_ids"], golden["labels"], steps=(2, 4), initial_state=golden["initial_state"]
        )
    output.loss.backward()
    assert output.loss.item() == pytest.approx(fixture.description["grads"]["n2_k4"]["loss"], abs=0.03)
    for name, parameter in fixture.model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.norm().item() == pytest.approx(norms[name], rel=0.1), name


@pytest.mark.parametrize("name", ["tiny_a", "tiny_c"])
def test_bfloat16_weights_keep_the_loss(name: str) -> None:
    fixture = load_fixture(GOLDEN / name)
    golden = fixture.golden
    loss = fixture.model.bfloat16()(
        golden["input_ids"], golden["labels"], steps=(4, 0), initial_state=golden["initial_state"]
    ).loss
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(golden["loss_r4"].item(), abs=0.03)


def test_forward_needs_no_memory_on_the_meta_device() -> None:
    with torch.device("meta"):
        built = RecurrentLM(ModelSection(preset="huginn-3.5b"))
        tokens, state = torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, 5280)
    output = built(tokens, tokens, steps=(3, 2), initial_state=state)
    output.loss.backward()
    assert output.loss.is_meta and built.transformer["adapter"].weight.grad is not None


def test_training_returns_no_logits_unless_asked(model: RecurrentLM, tokens: Tensor) -> None:
    output = model(tokens, tokens, steps=(0, 1))
    assert output.logits is None and output.state_stats is None
    output = model(tokens, tokens, steps=(0, 1), return_logits=True)
    assert output.logits.shape == (3, 16, 67) and output.logits.dtype == torch.float32
    assert model(tokens).loss is None


def test_latent_state_is_a_function_of_its_key() -> None:
    like = torch.zeros(1)
    first, again = draw_state((2, 9, 64), like, (1, 2, 3, 4)), draw_state((2, 9, 64), like, (1, 2, 3, 4))
    assert torch.equal(first, again)
    for key in ((0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)):
        assert not torch.equal(first, draw_state((2, 9, 64), like, key))
    large = draw_state((4, 128, 256), like, (7,))
    assert large.std().item() == pytest.approx(0.6238, rel=0.01)  # sqrt(2/5), a little less for the cut at 3 std
    assert large.abs().max().item() <= 3 * math.sqrt(2 / 5)
    assert not draw_state((1, 2, 3), like, None, scale=0.0).any()


def test_statistics_name_the_two_known_failures(model: RecurrentLM, tokens: Tensor) -> None:
    stats = model(tokens, tokens, steps=(1, 1), with_stats=True).state_stats
    assert stats.keys() == {"token_correlation", "relative_change", "state_norm", "prelude_norm"}
    assert all(not value.requires_grad and value.ndim == 0 for value in stats.values())
    states = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(3))
    pairs = [torch.corrcoef(row)[~torch.eye(5, dtype=torch.bool)].mean() for row in states]
    assert token_correlation(states).item() == pytest.approx(torch.stack(pairs).mean().item(), abs=1e-5)
    assert token_correlation(states[:, :1].expand(2, 5, 40)).item() == pytest.approx(1.0, abs=1e-5)


def test_a_varying_recurrence_compiles_nothing_new(model: RecurrentLM, tokens: Tensor) -> None:
    torch._dynamo.reset()
    counters.clear()
    compile_blocks(model, backend="eager")  # what Dynamo traces does not depend on the backend
    expected = gradients(model, tokens, steps=(1, 2))
    assert counters["stats"]["unique_graphs"] == 2  # with gradient and without, shared by all blocks
    with torch._dynamo.config.patch(error_on_recompile=True):
        for r in range(1, 13):
            model(tokens, tokens, steps=(max(r - 2, 0), min(r, 2))).loss.backward()
    plain = RecurrentLM(SMALL)
    plain.load_state_dict(model.state_dict())
    for name, grad in gradients(plain, tokens, steps=(1, 2)).items():
        torch.testing.assert_close(grad, expected[name], atol=1e-5, rtol=1e-4)
    torch._dynamo.reset()
