"""RunConfig: what a run is, read from YAML, checked once, frozen. Imports no torch."""

from training.config.load import dump_config, load_config
from training.config.presets import PRESETS
from training.config.schema import ModelSection, RunConfig

__all__ = ["PRESETS", "ModelSection", "RunConfig", "dump_config", "load_config"]
