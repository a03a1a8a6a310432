"""Weights out and in: plain safetensors, or the layout that the public reference model's own modelling file loads.

    safetensors   FOLDER/model.safetensors, config.json (the model section), tokenizer.json
    hf            the same names, with freqs_cis and a tied lm_head left out, and config.json with the reference's keys

Large weights are split into shards with an index, as the ecosystem does.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from training.checkpoint import catalog, layout, universal
from training.checkpoint.state import read_progress
from training.config import ModelSection
from training.config.exported import MODEL_TYPE, REFERENCE_KEYS, model_section
from training.errors import UsageError
from training.model.recurrent import RecurrentLM

ExportFormat = Literal["safetensors", "hf"]

_SHARD_BYTES = 5 * 10**9
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TABLE = "freqs_cis"


def reference_config(model: ModelSection, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Returns config.json for the reference's modelling file."""
    values: dict[str, Any] = {theirs: getattr(model, ours) for theirs, ours in REFERENCE_KEYS.items()}
    return {
        **values,
        "model_type": MODEL_TYPE,
        "architectures": ["RavenForCausalLM"],
        "n_layers": model.prelude_layers + model.core_layers + model.coda_layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.heads,
        "padding_multiple": 1,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def rotary_table(model: ModelSection) -> Tensor:
    """Returns the reference's freqs_cis, float32 [1, context, 1, D/2, 2] (cos, sin)."""
    half = model.head_width // 2
    frequency = 1.0 / (model.rope_base ** (torch.arange(0, half, dtype=torch.float32) * 2 / model.head_width))
    angles = torch.outer(torch.arange(model.context_length, dtype=torch.float32), frequency)
    return torch.stack((angles.cos(), angles.sin()), dim=-1).view(1, model.context_length, 1, half, 2)


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Returns the whole float32 weights in a checkpoint, whatever ranks and ZeRO stage it was saved with."""
    _, more = read_progress(folder)
    converted = universal.convert(folder, more.get("parameter_names", []))
    names = sorted(path.parent.name for path in converted.glob("zero/*/fp32.pt"))
    return {name: torch.load(converted / "zero" / name / "fp32.pt", weights_only=True)["param"] for name in names}


def newest_weights(root: Path) -> tuple[int, dict[str, Tensor]]:
    """Returns step and weights of the newest checkpoint in `root` that verifies. Raises UsageError."""
    choice = catalog.newest_valid(root)
    if choice.folder is None or choice.manifest is None:
        reasons = "; ".join(str(passed) for passed in choice.passed_over) or "there is none"
        raise UsageError(f"no checkpoint to export in {root}: {reasons}", "see `fab checkpoints --verify`")
    return choice.manifest.step, weights_of(choice.folder)


def export(
    weights: Mapping[str, Tensor],
    model: ModelSection,
    target: Path,
    *,
    form: ExportFormat,
    dtype: torch.dtype = torch.float32,
    tokenizer: Path | None = None,
    shard_bytes: int = _SHARD_BYTES,
) -> Path:
    """Writes weights, configuration and tokenizer into the new folder `target`, which appears whole or not at all.

    Norm weights and other tensors are all written as `dtype`; the rotary table of hf stays float32. Raises UsageError.
    """
    _check_complete(weights, model)
    if target.exists():
        raise UsageError(f"{target} exists already", "choose another folder with --to")
    staged = target.with_name(f".{target.name}.part")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}
    if form == "hf":
        tensors[_TABLE] = rotary_table(model)
    _write_shards(tensors, staged, shard_bytes)
    config = reference_config(model, dtype) if form == "hf" else model.model_dump(mode="json")
    (staged / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if tokenizer is not None:
        shutil.copyfile(tokenizer, staged / "tokenizer.json")
    for name in layout.iter_files(staged):
        layout.flush(staged / name)
    staged.rename(target)
    layout.flush(target.parent)
    return target


def read_weights(folder: Path) -> tuple[ModelSection, dict[str, Tensor]]:
    """Reads an export, or a checkpoint of the reference model, back:

    Model section and float32 weights, checked for shape.

    Raises UsageError.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {folder / 'config.json'}: {error}", "name the folder of a checkpoint") from None
    model = model_section(config)
    weights: dict[str, Tensor] = {}
    for path in _shards(folder):
        with safe_open(path, framework="pt") as file:
            weights.update({name: file.get_tensor(name).float() for name in file.keys()})  # noqa: SIM118 (no mapping)
    weights.pop(_TABLE, None)  # follows from the configuration
    if model.tie_embeddings:
        weights.pop("lm_head.weight", None)
    _check_complete(weights, model)
    return model, weights


def _check_complete(weights: Mapping[str, Tensor], model: ModelSection) -> None:
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in RecurrentLM(model).state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [f"{name} is unknown" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"{name} has shape {list(found[name])} instead of {list(expected[name])}"
        for name in sorted(expected.keys() & found.keys())
        if expected[name] != found[name]
    ]
    if problems:
        shown = "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")
        raise UsageError(
            f"the weights do not fit the configuration: {shown}", "take weights and config.json of one model"
        )


def _write_shards(tensors: Mapping[str, Tensor], folder: Path, shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / _SINGLE, metadata={"format": "pt"})
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        path = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, path, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, path.name))
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": places}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(folder: Path) -> list[Path]:
    if (folder / _INDEX).is_file():
        names = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        paths = sorted({folder / name for name in names if layout.is_safe_name(name)})
    else:
        paths = [folder / _SINGLE]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise UsageError(f"{folder} lacks {', '.join(missing)}", "name the folder of a whole checkpoint (safetensors)")
    return paths
