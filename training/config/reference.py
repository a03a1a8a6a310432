"""Writes docs/configuration.md from the sections themselves.

python -m training.config.reference > docs/configuration.md
"""

from __future__ import annotations

import json
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from training.config.presets import PRESETS
from training.config.schema import RunConfig

INTRODUCTION = """# Configuration

A run is described by one YAML file, by default `config.yaml` in the checkout. Single keys are overridden on the command
line: `fab train --set training.max_steps=1000 --set run.seed=7`. The value is read as YAML. A key that does not exist
is refused with the nearest one that does; all errors are listed in one answer, each with file, line and key, and the
exit code is 2. The resolved configuration, every default written out, lies in the run folder as `config.resolved.yaml`.

This page is generated from `training/config/`; a test keeps it in step.
"""


def reference() -> str:
    """Returns the page."""
    parts = [INTRODUCTION]
    for name, field in RunConfig.model_fields.items():
        parts += _section(name, field.annotation, "##")
    return "\n".join([*parts, _presets()])


def _section(name: str, section: Any, heading: str) -> list[str]:
    """Returns the table of a section and of the sections inside it."""
    parts = [f"{heading} {name}\n\n{_first_line(section)}\n\n{_table(section)}"]
    for key, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            parts += _section(f"{name}.{key}", field.annotation, heading + "#")
    return parts


def _table(section: type[BaseModel]) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, field in section.model_fields.items():
        kind = _escape(_kind(field.annotation))
        rows.append(f"| `{key}` | {kind} | {_default(field)} | {_escape(field.description or '')} |")
    return "\n".join(rows) + "\n"


def _presets() -> str:
    keys = list(next(iter(PRESETS.values())))
    rows = ["## Presets of the model", "", "| key | " + " | ".join(f"`{name}`" for name in PRESETS) + " |"]
    rows.append("|---" * (len(PRESETS) + 1) + "|")
    rows += [f"| `{key}` | " + " | ".join(str(PRESETS[name][key]) for name in PRESETS) + " |" for key in keys]
    return "\n".join(rows)


_NAMES = {int: "integer", float: "number", str: "text", bool: "true, false", type(None): "null"}


def _kind(annotation: Any) -> str:
    """Returns a type as a reader of YAML thinks of it."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(parts[0])
    if origin is Literal:
        return " \\| ".join(str(value) for value in parts)
    inner = [_kind(part) for part in parts]
    if origin in (Union, types.UnionType):
        return " \\| ".join(inner)
    if origin in (dict, tuple):
        return f"list of {inner[0]}" if origin is tuple else f"mapping of {' to '.join(inner)}"
    return _NAMES.get(annotation, "mapping")


def _default(field: Any) -> str:
    if field.default is PydanticUndefined:
        return "see below"
    value = field.default
    if isinstance(value, BaseModel):
        return "see below"
    return _escape(f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`")


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\\\\|", "\\|")


def _first_line(section: type[BaseModel]) -> str:
    return (section.__doc__ or "").strip().splitlines()[0]


if __name__ == "__main__":
    print(reference())
