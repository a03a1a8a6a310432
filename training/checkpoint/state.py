"""What a run needs beside DeepSpeed's state to go on as if nothing had happened."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from training.checkpoint.errors import CheckpointError

STATE_NAME = "state.json"


@dataclass(frozen=True)
class SavedProgress:
    """Where a run is, the same on all ranks.

    step      optimizer steps done (learning rate and recurrence counts follow from it)
    epoch     and `sample`: the next sequence to read, counted over all ranks; the data order follows from them
    counters  what else the run counts (tokens seen, skipped steps, rollbacks ...)
    skips     stretches of the data that are left out after rollbacks: [first, stop) in stream positions
    """

    step: int
    epoch: int
    sample: int
    counters: Mapping[str, float] = field(default_factory=dict)
    skips: tuple[tuple[int, int], ...] = ()

    def to_bytes(self, **more: Any) -> bytes:
        """Returns the JSON of state.json; `more` are further top-level keys."""
        return (json.dumps({**asdict(self), **more}, sort_keys=True, indent=1) + "\n").encode()


def read_progress(folder: Path) -> tuple[SavedProgress, dict[str, Any]]:
    """Returns the progress saved in a checkpoint and the further keys of its state.json. Raises CheckpointError."""
    try:
        raw: dict[str, Any] = json.loads((folder / STATE_NAME).read_bytes())
        skips = tuple((int(first), int(stop)) for first, stop in raw.pop("skips"))
        step, epoch, sample, counters = (raw.pop(key) for key in ("step", "epoch", "sample", "counters"))
        progress = SavedProgress(step, epoch, sample, counters, skips)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"cannot read {folder / STATE_NAME}: {error}", "take another step") from None
    return progress, raw


def rng_name(rank: int) -> str:
    """Name of the file with a rank's random state."""
    return f"rng/rank-{rank:05d}.pt"


def rng_state() -> dict[str, Any]:
    """Returns the state of the generators of Python, NumPy and torch in this process."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng_state(path: Path) -> None:
    """Restores what `rng_state` returned, from a file. Reads no pickled code."""
    state = torch.load(path, weights_only=True)
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
