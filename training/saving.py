"""Saves the trained model: weights, configuration and tokenizer in one folder that appears whole or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file
from torch import Tensor

from training.checkpoint.layout import flush
from training.config import RunConfig, load_config
from training.errors import UsageError
from training.model.recurrent import RecurrentLM
from training.records import RunFolder

if TYPE_CHECKING:
    from training.engine import Engine
    from training.safety import Progress


def save_model(engine: Engine, tokenizer: Path, run: RunFolder, progress: Progress) -> None:
    """Writes models/step-N of the run folder; a collective under ZeRO-3."""
    state = engine.full_state_dict()
    if not engine.rank.is_first:
        return
    target = run.models / f"step-{progress.step:08d}"
    staged = target.with_name(f".{target.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    save_file(state, staged / "model.safetensors")
    shutil.copyfile(run.config, staged / "config.resolved.yaml")
    shutil.copyfile(tokenizer, staged / "tokenizer.json")
    (staged / "progress.json").write_text(json.dumps({"step": progress.step, "tokens": progress.tokens}) + "\n")
    for path in staged.iterdir():
        flush(path)
    shutil.rmtree(target, ignore_errors=True)
    staged.rename(target)
    flush(run.models)
    run.event("model", progress.step, f"saved the model as {target.name}")


def tokenizer_of(run: RunFolder) -> Path | None:
    """Returns the tokenizer that the run was trained with, where its dataset is still there or a model was saved."""
    dataset = Path(json.loads(run.plan.read_text(encoding="utf-8"))["dataset_dir"])
    candidates = [dataset / "tokenizer.json", *sorted(run.models.glob("step-*/tokenizer.json"))]
    return next((path for path in reversed(candidates) if path.is_file()), None)


def newest_model(run: RunFolder) -> Path:
    """Returns the folder of the newest saved model. Raises UsageError when there is none."""
    folders = sorted(run.models.glob("step-*"))
    if not folders:
        raise UsageError(f"run {run.name} has no saved model yet", "wait for its end, or see fab status")
    return folders[-1]


def load_model(folder: Path) -> tuple[RecurrentLM, RunConfig]:
    """Returns a saved model in evaluation mode, float32 on the CPU, and its configuration."""
    config = load_config(folder / "config.resolved.yaml")
    model = RecurrentLM(config.model)
    weights: dict[str, Tensor] = load_file(folder / "model.safetensors")
    model.load_state_dict({name: value.float() for name, value in weights.items()})
    return model.eval(), config
