"""One rank of the loss-curve tests: trains the same run under several layouts in one process and prints the losses.

Called under torchrun with a JSON object {label: [override, ...]}, a number of steps and a run folder; rank 0 prints one
JSON line a label.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from training.checkpoint.manager import CheckpointManager
from training.checkpoint.ranks import GlooRanks
from training.checkpoint.saver import Identity
from training.config import load_config
from training.data.order import samples
from training.distributed import RankInfo, join, leave
from training.engine import Engine, EngineSettings
from training.evaluation import Evaluator
from training.preemption import StopFlag
from training.records import RunFolder
from training.safety import Safety
from training.trainer import Trainer

BASE = [
    "model.vocab_size=128",
    "model.context_length=32",
    "model.width=32",
    "model.heads=2",
    "model.mlp_width=64",
    "training.batch_size=8",
    "training.precision=fp32",
    "training.learning_rate=3e-3",
    "training.warmup_steps=4",
    "training.lr_schedule=cosine",
    "monitoring.log_interval_steps=1",
    "checkpoint.interval_steps=null",
]


class SmallDataset:
    """Sequences with something to learn: counting up from a random token, in memory."""

    sequence_length = 32
    pad_token_id = None

    def __len__(self) -> int:
        return 60  # not a multiple of the batch: an epoch ends inside one

    def order(self, seed: int, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return samples(seed, epoch, positions, len(self))

    def stage(self, indices: npt.NDArray[np.int64]) -> None:
        """Nothing to fetch ahead: everything is in memory."""

    def read(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return (indices[:, None] * 7 + np.arange(self.sequence_length + 1)) % 128


class PoisonedTrainer(Trainer):
    """Gives NaN to the last rank alone in its third step."""

    def _latent_states(self, positions: Any) -> Tensor:
        states = super()._latent_states(positions)
        mine = self.rank.rank == self.rank.world_size - 1 and self.progress.step == 2
        return states * float("nan") if mine else states


class BadDataTrainer(Trainer):
    """Whatever is trained on positions 80 to 111 of the stream gives NaN, as broken data would."""

    def _latent_states(self, positions: Any) -> Tensor:
        states = super()._latent_states(positions)
        return states * float("nan") if any(80 <= position < 112 for position in positions) else states


def kind_of(label: str) -> type[Trainer]:
    if "poisoned" in label:
        return PoisonedTrainer
    return BadDataTrainer if "bad data" in label else Trainer


def losses(label: str, overrides: list[str], steps: int, run: RunFolder, rank: RankInfo) -> dict[str, object]:
    config = load_config(None, [*BASE, f"training.max_steps={steps}", *overrides])
    share = config.training.batch_size // rank.world_size
    micro = share if config.training.micro_batch_size == "auto" else config.training.micro_batch_size
    stage = 1 if config.distributed.zero_stage == "auto" else config.distributed.zero_stage
    settings = EngineSettings(config.training.precision, stage, micro, share // micro, config.training.compile is True)
    engine = Engine(config, settings, rank)
    seen: list[object] = []

    class Recorder:
        def on_start(self, step: int, total_steps: int) -> None: ...

        def on_step(self, report: object) -> None:
            seen.append((report.metrics.loss, report.metrics.grad_norm))  # type: ignore[attr-defined]

        def on_message(self, text: str) -> None: ...

        def on_end(self) -> None: ...

    dataset: Any = SmallDataset()
    evaluator = Evaluator(config, engine, dataset, rank)
    manager = CheckpointManager(
        engine.deepspeed, run.checkpoints, config.checkpoint, "run", Identity("c", "t"), GlooRanks(), run.event
    )
    trainer = kind_of(label)(
        config,
        rank,
        engine,
        dataset,
        run,
        total_steps=steps,
        evaluator=evaluator,
        safety=Safety(manager, StopFlag(), config.checkpoint),
        callbacks=[Recorder()],
    )
    progress = trainer.fit()
    manager.close()
    perplexity = evaluator.perplexity(4)
    engine.deepspeed.destroy()
    return {
        "losses": [pair[0] for pair in seen],  # type: ignore[index]
        "grad_norms": [pair[1] for pair in seen],  # type: ignore[index]
        "cursor": [progress.cursor.epoch, progress.cursor.sample],
        "perplexity": perplexity,
        "rollbacks": progress.rollbacks,
        "skips": [[skip.first, skip.stop] for skip in progress.skips],
        "skipped": int(engine.deepspeed.skipped_steps),
    }


if __name__ == "__main__":
    layouts, steps, folder = json.loads(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    rank = join("gloo", "env://", "cpu", 60)
    for number, (label, overrides) in enumerate(layouts.items()):
        run = RunFolder(folder / str(number))
        run.path.mkdir(parents=True, exist_ok=True)
        result = losses(label, overrides, steps, run, rank)
        if os.environ["RANK"] == "0":
            print("RESULT " + json.dumps({"label": label, **result}), flush=True)
    leave()
