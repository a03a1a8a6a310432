"""The latent states that training and evaluation start from, one for each sequence of the data stream."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from training.model.state import draw_state

# Keeps the streams of different uses of one seed apart.
TRAINING, EVALUATION = 1, 2


def latent_states(seed: int, purpose: int, positions: Iterable[int], length: int, width: int, like: Tensor) -> Tensor:
    """Returns s_0 [B, T, C] for the sequences at `positions` of the data stream, with the type and device of `like`.

    Each sequence's state depends on seed and position alone: neither the number of ranks nor the micro-batch nor a
    restart changes it, so loss curves of different layouts can be compared.
    """
    states = [draw_state((1, length, width), like, (seed, purpose, int(position))) for position in positions]
    return torch.cat(states)
