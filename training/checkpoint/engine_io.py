"""DeepSpeed's state in and out: its own file names and contents, but copied first and written by us later.

DeepSpeed hands every state dict of a save to its checkpoint engine together with the name of the file.
`CapturingEngine` takes that place: `save` copies the state to the host and keeps it; what was captured is written
by the saver, beside training. The files are those of DeepSpeed, so its universal conversion and its other tools go
on working.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from training.checkpoint.snapshot import HostCopier

# Folder of DeepSpeed's files in a checkpoint: the tag, in its words.
TAG = "deepspeed"


class CapturingEngine(CheckpointEngine):
    """DeepSpeed checkpoint engine that writes nothing: `save` keeps a copy, `take` hands the copies over."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "loopworks"
        self.copier = HostCopier()
        self._captured: dict[str, Any] = {}

    def create(self, info: Any) -> None:
        """Starts a new capture."""
        self._captured = {}

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Makes no folder: a failure on one rank here would leave the others waiting in a barrier."""

    def save(self, state_dict: Any, path: str) -> None:
        """Copies `state_dict`; `path` is relative to the checkpoint."""
        name = Path(path).as_posix()
        self._captured[name] = self.copier.copy(name, state_dict)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Reads one of DeepSpeed's files (pickled objects included: only files that verified come here)."""
        return torch.load(path, map_location=map_location, weights_only=False)

    def commit(self, info: Any) -> bool:
        """The saver commits."""
        return True

    def preserves_storage_sharing(self) -> bool:
        """No: copies are of the tensors, not of the storages they are views of."""
        return False

    def take(self) -> dict[str, Any]:
        """Returns what was captured by name, after the copies have arrived."""
        self.copier.finish()
        captured, self._captured = self._captured, {}
        return captured


def install(engine: Any) -> CapturingEngine:
    """Makes `engine` (a DeepSpeedEngine) save into memory and returns what captures it."""
    capturing = CapturingEngine()
    engine.checkpoint_engine = capturing
    # Its recovery script would be written in the main thread, and on one rank only: see makedirs.
    engine._copy_recovery_script = lambda save_path: None
    return capturing


def capture(engine: Any, capturing: CapturingEngine) -> dict[str, Any]:
    """Copies this rank's part of the state of `engine` and returns it by file name.

    A collective, nothing is written.
    """
    engine.save_checkpoint(".", tag=TAG, save_latest=False)
    return capturing.take()


def zero_stage(engine: Any) -> int:
    """The ZeRO stage that the files of `engine` are of."""
    return int(engine.zero_optimization_stage())


def precision(engine: Any) -> str:
    """Precision of the weights: bf16, fp16 or fp32."""
    return "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32"


def parameter_names(engine: Any) -> list[list[str]]:
    """Returns the names of the parameters in each group of the optimizer, in its order, for stage 0.

    Empty for the other stages, whose groups are flat partitions: there DeepSpeed's own files say which part is what.
    """
    if zero_stage(engine) != 0:
        return []
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    optimizer = engine.optimizer
    groups = getattr(optimizer, "fp16_groups", None) or [group["params"] for group in optimizer.param_groups]
    return [[names[id(parameter)] for parameter in group] for group in groups]


def load(engine: Any, folder: Path, tag: str = TAG, *, universal: bool = False) -> None:
    """Loads DeepSpeed's files below `folder` into `engine`; a collective. Raises what DeepSpeed raises."""
    config = engine._config
    before = config.load_universal_checkpoint
    config.load_universal_checkpoint = universal
    try:
        engine.load_checkpoint(str(folder), tag=tag, load_lr_scheduler_states=True)
    finally:
        config.load_universal_checkpoint = before
