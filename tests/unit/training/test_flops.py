"""FLOP formulas against torch's counter and the reference's figures; peak rates by device name."""

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from training.config.schema import ModelSection
from training.flops import flop_per_token, forward_flop, inference_flop_per_token
from training.hardware import PEAK_RATES, peak_flop_per_s
from training.model.init import init_weights
from training.model.recurrent import RecurrentLM


def small(**keys: object) -> ModelSection:
    shape = {"vocab_size": 96, "context_length": 32, "width": 32, "heads": 2, "mlp_width": 80, "prelude_layers": 2}
    return ModelSection(preset=None, **{**shape, "core_layers": 3, "coda_layers": 1, **keys})


def counted_model(config: ModelSection, checkpointing: bool = False) -> RecurrentLM:
    """In bfloat16, where attention on a processor is plain products: torch does not count the fused kernel."""
    model = RecurrentLM(config, activation_checkpointing=checkpointing).bfloat16()
    init_weights(model, config, seed=0)
    return model


@pytest.mark.parametrize(
    ("config", "n", "k"),
    [
        (small(), 0, 1),
        (small(), 3, 2),
        (small(core_layers=1, prelude_layers=1, vocab_size=33), 5, 4),
        (small(tie_embeddings=False, qk_bias=False, width=48), 1, 3),
    ],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_training_flop_is_what_torch_counts(config: ModelSection, n: int, k: int, recompute: bool) -> None:
    batch, length = 2, 24
    model = counted_model(config, recompute)
    tokens = torch.randint(0, config.vocab_size, (batch, length))
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens, steps=(n, k), generator_key=(1,)).loss.backward()
    expected = flop_per_token(config, length, n, k, recompute=recompute, causal=False) * batch * length
    assert counter.get_total_flops() == expected


def test_inference_flop_is_what_torch_counts() -> None:
    config = small()
    model = counted_model(config)
    tokens = torch.randint(0, config.vocab_size, (2, 24))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens, steps=(5, 0))
    assert counter.get_total_flops() == inference_flop_per_token(config, 24, 5, causal=False) * 48


def test_the_references_figures() -> None:
    huginn = ModelSection(preset="huginn-3.5b")
    assert flop_per_token(huginn, 4096, 24, 8, causal=False) == pytest.approx(186.4e9, rel=1e-3)
    assert flop_per_token(huginn, 4096, 24, 8, recompute=True, causal=False) == pytest.approx(215.3e9, rel=1e-3)


def test_backward_does_not_grow_with_iterations_that_get_no_gradient() -> None:
    config = small()
    more = flop_per_token(config, 24, 9, 2) - flop_per_token(config, 24, 8, 2)
    assert more == pytest.approx(forward_flop(config, 24).iteration)


def test_causal_attention_costs_half_of_the_full_one() -> None:
    config = small()
    full, half = (forward_flop(config, 31, causal=causal).prelude for causal in (False, True))
    assert full - half == pytest.approx(2 * 4 * 15 * 32)  # two layers, 31 tokens against 16 on average


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA B300 SXM6 AC", 2250e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("AMD Instinct MI250X", 191.5e12),
        ("AMD Instinct MI300X", 1307.4e12),
        ("Tesla V100-SXM2-16GB", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Some Future GPU", None),
        ("", None),
    ],
)
def test_peak_rate_by_the_drivers_name(name: str, bf16: float | None) -> None:
    assert peak_flop_per_s(name, "bf16") == bf16


def test_v100_computes_in_float16() -> None:
    assert peak_flop_per_s("Tesla V100-SXM2-16GB", "fp16") == 125e12
    assert peak_flop_per_s("Tesla V100-PCIE-32GB", "fp16") == 112e12


def test_every_rate_is_dense_and_has_a_source() -> None:
    for key, rate in PEAK_RATES.items():
        assert rate.source, key
        assert rate.fp16 in (rate.bf16, rate.fp16) and 0 < rate.fp32 < rate.fp16 < 3e15, key


def test_formulas_need_no_torch() -> None:
    code = "import sys, training.flops, training.hardware, training.model_size, training.model.sampler; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
