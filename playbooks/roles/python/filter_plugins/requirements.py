"""What a node's Python has to hold, from pyproject.toml and constraints/."""

from __future__ import annotations

import hashlib
import importlib
import json
from typing import Any


def project_requirements(pyproject: str, extras: list[str]) -> list[str]:
    """Returns the dependencies that the text of a pyproject.toml names, those of the extras after them."""
    project = _project(pyproject)
    optional = project.get("optional-dependencies", {})
    unknown = [extra for extra in extras if extra not in optional]
    if unknown:
        raise ValueError(
            f"python_extras: pyproject.toml has no extra {', '.join(unknown)}. "
            f"Take one of {', '.join(sorted(optional))}"
        )
    found = [*project.get("dependencies", []), *(item for extra in extras for item in optional[extra])]
    return list(dict.fromkeys(found))


def merged_constraints(platform: str, common: str) -> str:
    """Returns the constraints of a platform as one text: those in common, then its own, without its `-c` line."""
    own = [line for line in platform.splitlines() if not line.startswith("-c ")]
    return "\n".join([common.rstrip(), *own]) + "\n"


def content_stamp(content: Any) -> str:
    """Returns a short hash that changes with any part of the content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _project(pyproject: str) -> dict[str, Any]:
    for name in ("tomllib", "tomli"):  # tomllib came with Python 3.11
        try:
            return dict(importlib.import_module(name).loads(pyproject)["project"])
        except ImportError:
            continue
    raise ValueError(
        "pyproject.toml cannot be read by this Python. Run Ansible with Python 3.11 or newer, or pip install tomli"
    )


class FilterModule:
    """What Ansible looks for in this file."""

    def filters(self) -> dict[str, Any]:
        """Names of the filters."""
        return {
            "project_requirements": project_requirements,
            "merged_constraints": merged_constraints,
            "content_stamp": content_stamp,
        }
