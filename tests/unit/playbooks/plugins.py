"""Filters and modules of the playbooks lie where Ansible looks for them, not where Python does: loads them by path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

PLAYBOOKS = Path(__file__).resolve().parents[3] / "playbooks"


def load(path: str) -> ModuleType:
    """Returns the module at playbooks/PATH."""
    spec = importlib.util.spec_from_file_location(path.replace("/", "_").removesuffix(".py"), PLAYBOOKS / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
