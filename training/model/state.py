"""The latent state a forward starts from, and how healthy the state is that it ends with."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

CUT_STD = 3.0  # normal draws are truncated at so many standard deviations, for states and for weights


def seed_of(*key: int) -> int:
    """A 63-bit seed that depends on every part of the key (numpy's SeedSequence, the same in all its versions)."""
    return int(np.random.SeedSequence([part % 2**64 for part in key]).generate_state(1, np.uint64)[0] >> 1)


def draw_state(shape: tuple[int, int, int], like: Tensor, key: tuple[int, ...] | None, scale: float = 1.0) -> Tensor:
    """Draws s_0 [B, T, C] with the type and device of `like`.

    Truncated normal with std sqrt(2 / (5 C)), times sqrt(C): std sqrt(2/5) whatever the width (arXiv 2502.05171,
    section 3). `key`, usually (seed, global step, micro step, rank), makes the draw repeatable after a restart; None
    uses torch's default generator. `scale` 0 gives zeros.
    """
    if scale == 0.0:
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    generator = None
    if key is not None:
        generator = torch.Generator(device=like.device).manual_seed(seed_of(*key))
    std = math.sqrt(2 / 5)
    state = torch.empty(shape, dtype=torch.float32, device=like.device)
    nn.init.trunc_normal_(state, std=std, a=-CUT_STD * std, b=CUT_STD * std, generator=generator)
    return (state * scale if scale != 1.0 else state).to(like.dtype)


@torch.no_grad()
def state_statistics(state: Tensor, previous: Tensor, embedded: Tensor) -> dict[str, Tensor]:
    """Health of the recurrence, as float32 scalars: s_r, s_{r-1} and the prelude output, all [B, T, C], go in.

    token_correlation   mean correlation of two different tokens of a sequence (each state centred over its channels);
                        towards 1 the tokens have become the same and the model is lost (section 4.3 of the paper)
    relative_change     mean over tokens of |s_r - s_{r-1}| / |s_r|
    state_norm, prelude_norm   mean over tokens of the L2 norm
    """
    state, previous, embedded = state.float(), previous.float(), embedded.float()
    norm = state.norm(dim=-1)
    return {
        "token_correlation": token_correlation(state),
        "relative_change": ((state - previous).norm(dim=-1) / norm.clamp(min=1e-12)).mean(),
        "state_norm": norm.mean(),
        "prelude_norm": embedded.norm(dim=-1).mean(),
    }


def token_correlation(state: Tensor) -> Tensor:
    """Mean over pairs of different tokens of the correlation of their channels; state [B, T, C], scalar out.

    The sum over all pairs of unit vectors is |sum of the vectors|^2, so no T x T matrix is needed.
    """
    length = state.shape[1]
    if length < 2:
        return torch.zeros((), device=state.device)
    unit = nn.functional.normalize(state - state.mean(-1, keepdim=True), dim=-1)
    all_pairs = unit.sum(1).square().sum(-1)
    return ((all_pairs - length) / (length * (length - 1))).mean()
