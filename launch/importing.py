"""`fab import`: a configuration whose run starts from exported weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launch.errors import StorageError, UsageError
from launch.request import DEFAULT_CONFIG
from training.config import dump_config, load_config
from training.config.exported import model_values


def write_configuration(source: str, target: str, overrides: tuple[str, ...] = ()) -> Path:
    """Writes config.yaml's settings with the model of `source` and run.init_from into the new file `target`.

    Raises UsageError when the weights cannot be used, StorageError when the file cannot be written.
    """
    folder, path = Path(source).absolute(), Path(target)
    try:
        values: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read {folder / 'config.json'}: {error}", "name the folder of exported weights"
        ) from None
    model = [f"model.{key}={json.dumps(value)}" for key, value in model_values(values).items()]
    config = load_config(DEFAULT_CONFIG, [*model, f"run.init_from={json.dumps(str(folder))}", *overrides])
    if path.exists():
        raise UsageError(f"{path} exists already", "choose another file with --to")
    try:
        path.write_text(dump_config(config), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}", "choose another place with --to") from None
    return path
