"""Initial weights, after Takase et al. as the reference uses them (arXiv 2502.05171, section 3.2).

std = sqrt(2 / (5 C)) for embedding, Wqkv, mlp.fc, adapter and an untied head; std / sqrt(2 L) for the projections
that write into the residual stream, where L = prelude + coda + core * mean_recurrence layers are run on average. All
draws are normal, cut at three standard deviations; norm weights are 1 and biases 0.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor, nn

from training.config.schema import ModelSection
from training.model.state import CUT_STD, seed_of


def effective_depth(config: ModelSection) -> int:
    """Layers an average forward runs through."""
    return config.prelude_layers + config.coda_layers + config.core_layers * config.mean_recurrence


def initial_std(name: str, config: ModelSection) -> float | None:
    """Standard deviation of the parameter called `name`; None for norms (all ones) and biases (all zeros)."""
    if name.endswith("qk_bias") or "norm_" in name or "ln_f" in name:
        return None
    std = math.sqrt(2 / (5 * config.width))
    return std / math.sqrt(2 * effective_depth(config)) if name.endswith("proj.weight") else std


@torch.no_grad()
def init_weights(model: nn.Module, config: ModelSection, seed: int) -> None:
    """Fills every parameter of `model`.

    Each parameter has a generator of its own, keyed by seed and name, and is drawn in float32 on the CPU: the result
    depends neither on the device nor on the number of ranks. Parameters on the meta device are left alone; those that
    ZeRO-3 has partitioned are gathered one at a time, so call it on all ranks.
    """
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                _fill(parameter, name, config, seed)
        elif not parameter.is_meta:
            _fill(parameter, name, config, seed)


def _fill(parameter: Tensor, name: str, config: ModelSection, seed: int) -> None:
    std = initial_std(name, config)
    if std is None:
        parameter.fill_(0.0 if name.endswith("qk_bias") else 1.0)
        return
    generator = torch.Generator().manual_seed(seed_of(seed, zlib.crc32(name.encode())))
    draw = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
    nn.init.trunc_normal_(draw, std=std, a=-CUT_STD * std, b=CUT_STD * std, generator=generator)
    parameter.copy_(draw)
