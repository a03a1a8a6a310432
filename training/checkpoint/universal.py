"""Conversion to DeepSpeed's universal layout, so that any world size and ZeRO stage can resume from any other.

DeepSpeed's own converter does the work for stages 1 to 3. What it leaves out is added here:

- its output for stage 3 cannot be loaded by stages 1 and 2 and the other way round (bare tensors against dicts, the
step in
  another place, another name of the file with the counters): `_complete` makes the output loadable by all;
- it does not know stage 0: `_convert_unsharded` writes the same layout from plain optimizer state, `load_unsharded`
reads it;
- loading under stage 3 gives all parameter groups the settings of the first one (weights without decay would get
it), and
  one step counter in common, which then counts once per group: `load_universal` puts both right.

    CACHE/step-00000120/zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt      one folder per parameter
    CACHE/step-00000120/zero/optimizer_state.pt                          what is not per parameter
    CACHE/step-00000120/*_model_states.pt                                counters, under the names of both kinds
    CACHE/step-00000120/SOURCE                                           written last: which checkpoint this was made of
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from training.checkpoint import engine_io, layout
from training.checkpoint.errors import CheckpointError
from training.checkpoint.layout import Manifest

CACHE_NAME = ".universal"
_SOURCE = "SOURCE"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MODEL_STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


def needs_conversion(manifest: Manifest, world_size: int, zero_stage: int, precision: str) -> bool:
    """Whether a checkpoint fits another layout of ranks, stage or precision than the engine's."""
    return (manifest.world_size, manifest.zero_stage, manifest.precision) != (world_size, zero_stage, precision)


def convert(folder: Path, parameter_names: list[list[str]], workers: int | None = None) -> Path:
    """Returns the universal form of the checkpoint in `folder`, made now or found in the cache beside it.

    One rank calls this.

    `parameter_names` is what state.json holds (needed for stage 0). Raises CheckpointError.
    """
    manifest = layout.read_manifest(folder)
    target = folder.parent / CACHE_NAME / folder.name
    source = (folder / layout.COMMIT_NAME).read_bytes()
    if (target / _SOURCE).is_file() and (target / _SOURCE).read_bytes() == source:
        return target
    # One conversion is kept: each is as large as a checkpoint.
    shutil.rmtree(target.parent, ignore_errors=True)
    target.mkdir(parents=True)
    deepspeed_files = folder / engine_io.TAG
    if manifest.zero_stage == 0:
        _convert_unsharded(deepspeed_files, target, parameter_names)
    else:
        _run_converter(deepspeed_files, target, workers or max(1, (os.cpu_count() or 2) // 2))
        _complete(deepspeed_files, target, manifest.zero_stage)
    layout.write_file(target / _SOURCE, source)
    return target


def load_universal(engine: Any, converted: Path) -> None:
    """Loads the universal form into a DeepSpeed engine of any stage and world size; a collective."""
    if engine_io.zero_stage(engine) == 0:
        load_unsharded(engine, converted)
        return
    groups = engine.optimizer.param_groups
    settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    engine_io.load(engine, converted.parent, converted.name, universal=True)
    for group, kept in zip(engine.optimizer.param_groups, settings, strict=True):
        group.update(kept)
    for state in engine.optimizer.optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()


def load_unsharded(engine: Any, converted: Path) -> None:
    """Loads the universal form into an engine of stage 0, whose optimizer holds whole tensors."""
    counters = torch.load(converted / _MODEL_STATES[0], map_location="cpu", weights_only=False)
    engine.global_steps = counters["global_steps"]
    engine.global_samples = counters["global_samples"]
    engine.skipped_steps = counters["skipped_steps"]
    base, pairs = _unsharded_parameters(engine)
    with torch.no_grad():
        for name, parameter, master in pairs:
            folder = converted / "zero" / name
            weight = _read_tensor(folder / "fp32.pt").view(parameter.shape)
            master.copy_(weight)
            if parameter is not master:
                parameter.copy_(weight)
            state: dict[str, Any] = {"step": torch.load(folder / "step.pt", weights_only=False)}
            for key in _MOMENTS:
                state[key] = _read_tensor(folder / f"{key}.pt").view(parameter.shape).to(master.device, master.dtype)
            base.state[master] = state


def _unsharded_parameters(engine: Any) -> tuple[Any, list[tuple[str, Any, Any]]]:
    """Returns the plain optimizer of a stage-0 engine and (name, parameter, float32 master) of each parameter."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_groups"):  # 16-bit: the wrapper holds masters beside the parameters
        pairs = [
            (names[id(p)], p, m)
            for halves, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
            for p, m in zip(halves, masters, strict=True)
        ]
        return optimizer.optimizer, pairs
    return optimizer, [(names[id(p)], p, p) for group in optimizer.param_groups for p in group["params"]]


def _run_converter(source: Path, target: Path, workers: int) -> None:
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(source), "--output_folder", str(target)]
    command += ["--num_extract_workers", str(workers), "--num_merge_workers", str(workers)]
    # It needs no GPU, and must not take memory on one.
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise CheckpointError(
            f"{source.parent.name} could not be converted for another number of ranks: {last}",
            "resume with the ranks and ZeRO stage that it was saved with (`fab checkpoints` shows them), "
            f"or run by hand: {' '.join(command)}",
        )


def _complete(source: Path, target: Path, zero_stage: int) -> None:
    """Adds to the converter's output what the engines of other stages look for."""
    present = next(name for name in _MODEL_STATES if (target / name).is_file())
    for name in _MODEL_STATES:
        if name != present:
            os.link(target / present, target / name)
    for path in target.glob("zero_pp_rank_*_model_states.pt"):
        if path.name not in _MODEL_STATES:
            path.unlink()
    common_path = target / "zero" / "optimizer_state.pt"
    common = torch.load(common_path, map_location="cpu", weights_only=False)
    if zero_stage == 3:
        step = common["optimizer_state_dict"]["state"][0]["step"]
        groups = common["optimizer_state_dict"]["param_groups"]
        _shape_fragments(target, source, step)
    else:
        step = torch.load(next(target.glob("zero/*/step.pt")), weights_only=False)
        groups = common["param_groups"]
    torch.save(_common_state(step, groups, common), common_path)


def _shape_fragments(target: Path, source: Path, step: Any) -> None:
    """Gives the flat tensors of a stage-3 conversion their shapes and the form that stages 1 and 2 read."""
    states = torch.load(source / _MODEL_STATES[1], map_location="cpu", weights_only=False)
    for shapes in states["param_shapes"]:
        for name, shape in shapes.items():
            folder = target / "zero" / name
            for key in ("fp32", *_MOMENTS):
                torch.save({"param": _read_tensor(folder / f"{key}.pt").view(shape).clone()}, folder / f"{key}.pt")
            torch.save(step, folder / "step.pt")


def _common_state(step: Any, groups: list[dict[str, Any]], found: dict[str, Any]) -> dict[str, Any]:
    """What is not per parameter, in the places where each kind of engine looks for it."""
    import deepspeed

    plain = [{key: value for key, value in group.items() if key != "params"} | {"params": []} for group in groups]
    kept: dict[str, Any] = {
        key: found[key] for key in ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad") if key in found
    }
    return {
        **kept,
        "ds_version": deepspeed.__version__,
        "param_groups": plain,
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": plain},
    }


def _convert_unsharded(source: Path, target: Path, parameter_names: list[list[str]]) -> None:
    """Writes the universal layout from a stage-0 checkpoint, whose optimizer state is per parameter already."""
    states = torch.load(source / _MODEL_STATES[0], map_location="cpu", weights_only=False)
    optimizer = states["optimizer"]
    inner = optimizer.get("optimizer_state_dict", optimizer)
    names = [name for group in parameter_names for name in group]
    if len(names) != len(inner["state"]):
        raise CheckpointError(
            f"{source.parent.name} names {len(names)} parameters but holds the state of {len(inner['state'])}",
            "resume with the ranks and ZeRO stage that it was saved with",
        )
    masters = [m for group in optimizer["fp32_groups"] for m in group] if "fp32_groups" in optimizer else None
    step: Any = None
    for index, name in enumerate(names):
        state, folder = inner["state"][index], target / "zero" / name
        folder.mkdir(parents=True)
        weight = masters[index] if masters else states["module"][name]
        torch.save({"param": weight.detach().float()}, folder / "fp32.pt")
        for key in _MOMENTS:
            torch.save({"param": state[key].float()}, folder / f"{key}.pt")
        step = state["step"]
        torch.save(step, folder / "step.pt")
    torch.save(_common_state(step, inner["param_groups"], {}), target / "zero" / "optimizer_state.pt")
    for name in _MODEL_STATES:
        shutil.copyfile(source / _MODEL_STATES[0], target / name)


def _read_tensor(path: Path) -> torch.Tensor:
    value = torch.load(path, map_location="cpu", weights_only=False)
    tensor: torch.Tensor = value["param"] if isinstance(value, dict) else value
    return tensor
