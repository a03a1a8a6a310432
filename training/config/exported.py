"""config.json of exported weights, in the reference's keys and in ours. Torch-free: `fab import` reads it too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from training.config.schema import ModelSection
from training.errors import UsageError

MODEL_TYPE = "huginn_raven"

# Reference key -> our key, for those that carry a value over unchanged.
REFERENCE_KEYS = {
    "n_embd": "width",
    "n_heads": "heads",
    "block_size": "context_length",
    "vocab_size": "vocab_size",
    "intermediate_size": "mlp_width",
    "n_layers_in_prelude": "prelude_layers",
    "n_layers_in_recurrent_block": "core_layers",
    "n_layers_in_coda": "coda_layers",
    "mean_recurrence": "mean_recurrence",
    "mean_backprop_depth": "backprop_depth",
    "rope_base": "rope_base",
    "norm_eps": "norm_eps",
    "qk_bias": "qk_bias",
    "tie_embeddings": "tie_embeddings",
}


def model_values(config: Any, file: str | Path = "config.json") -> dict[str, Any]:
    """Returns the values of our model section for a config.json of the reference or of an export.

    `file` is for messages. Raises UsageError when something is missing or cannot be expressed.
    """
    if not isinstance(config, dict):
        raise UsageError(f"{file} holds no configuration keys", "use the reference's configuration")
    if config.get("model_type") != MODEL_TYPE:
        if "preset" in config:
            return dict(config)
        raise UsageError(
            f"{file} is of model type {config.get('model_type')!r}, not {MODEL_TYPE!r}",
            "import a checkpoint of the recurrent reference model, or one written by `fab export`",
        )
    missing = sorted(REFERENCE_KEYS.keys() - config.keys())
    if missing:
        raise UsageError(
            f"{file} lacks configuration keys: {', '.join(missing)}",
            "take the configuration that belongs to the weights",
        )
    heads = config["n_heads"]
    if config.get("num_key_value_heads", heads) != heads:
        raise UsageError(
            f"{file} asks for grouped-query attention, which this model does not have", "use another model"
        )
    return {"preset": None, **{ours: config[theirs] for theirs, ours in REFERENCE_KEYS.items()}}


def model_section(config: Any, file: str | Path = "config.json") -> ModelSection:
    """Returns our model section for a config.json. Raises UsageError."""
    try:
        return ModelSection.model_validate(model_values(config, file))
    except ValidationError as error:
        raise UsageError(f"{file}: the configuration is not valid: {error}", "correct the file") from error
