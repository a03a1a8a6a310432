"""config.json of exported weights, in the reference's keys and in ours. Torch-free: `fab import` reads it too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def model_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of our model section for a config.json of the reference or of an export. Raises UsageError."""
    if config.get("model_type") != MODEL_TYPE:
        if "preset" in config:
            return dict(config)
        raise UsageError(
            f"config.json is of model type {config.get('model_type')!r}, not {MODEL_TYPE!r}",
            "import a checkpoint of the recurrent reference model, or one written by `fab export`",
        )
    missing = sorted(REFERENCE_KEYS.keys() - config.keys())
    if missing:
        raise UsageError(f"config.json lacks {', '.join(missing)}", "take the config.json that belongs to the weights")
    heads = config["n_heads"]
    if config.get("num_key_value_heads", heads) != heads:
        raise UsageError(
            "the model shares keys and values among heads, which this trainer does not", "import another model"
        )
    return {"preset": None, **{ours: config[theirs] for theirs, ours in REFERENCE_KEYS.items()}}


def model_section(config: Mapping[str, Any]) -> ModelSection:
    """Returns our model section for a config.json. Raises UsageError."""
    return ModelSection.model_validate(model_values(config))
