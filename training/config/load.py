"""Reads a run configuration from YAML and `--set a.b=c`, and says everything that is wrong with it in one answer.

Each finding names file, line, key and, for an unknown key, the nearest valid name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from training.config.base import Section
from training.config.combinations import impossible_combinations
from training.config.schema import RunConfig
from training.errors import ConfigError, UsageError

KeyPath = tuple[str, ...]


class _Loader(yaml.SafeLoader):
    """YAML loader that reads 5e-5 as a number (YAML 1.1 asks for 5.0e-5) and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            if isinstance(key, str):
                seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def load_config(path: str | Path | None = None, overrides: Iterable[str] = ()) -> RunConfig:
    """Returns the frozen configuration of `path` (None: the defaults) with `overrides` such as "training.max_steps=10".

    Raises UsageError if the file cannot be read, ConfigError with all findings if it cannot be used.
    """
    data, origins = _read(Path(path)) if path is not None else ({}, {})
    for override in overrides:
        key, value = parse_override(override)
        _assign(data, key, value, override)
        origins[key] = f"--set {override}"
    return _validate(data, origins, str(path) if path is not None else "defaults")


def dump_config(config: RunConfig) -> str:
    """Returns the configuration as YAML, every key present, that `load_config` reads back to an equal object."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=120)


def parse_override(text: str) -> tuple[KeyPath, Any]:
    """Splits "a.b=value" into (("a", "b"), value); the value is read as YAML. Raises ConfigError."""
    key, separator, raw = text.partition("=")
    parts = tuple(key.strip().split("."))
    if not separator or not all(parts):
        raise ConfigError([f"--set {text}: write it as section.key=value, for example --set training.max_steps=1000"])
    try:
        return parts, yaml.load(raw, Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError([f"--set {text}: the value is not valid YAML ({_yaml_problem(error)})"]) from None


def _read(path: Path) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(
            f"there is no configuration file {path}", "name one with --config, or use config.yaml of the checkout"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read configuration file {path}: {error}", "check the file and its permissions"
        ) from None
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is None:
            raise ConfigError([f"{path}: the file is empty"], "start from config.yaml of the checkout")
        data = yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError([_yaml_finding(path, text, error)]) from None
    if not isinstance(data, dict):
        raise ConfigError(
            [f"{path}, line {node.start_mark.line + 1}: expected sections such as 'training:', got {_kind(data)}"]
        )
    return data, dict(_key_lines(node, path))


def _key_lines(node: yaml.Node, path: Path, prefix: KeyPath = ()) -> Iterable[tuple[KeyPath, str]]:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key = (*prefix, str(key_node.value))
            yield key, f"{path}, line {key_node.start_mark.line + 1}"
            yield from _key_lines(value_node, path, key)


def _yaml_problem(error: yaml.YAMLError) -> str:
    return " ".join(str(getattr(error, "problem", None) or error).split())


def _yaml_finding(path: Path, text: str, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(path)
    lines = text.splitlines()
    if mark and mark.line < len(lines) and "\t" in lines[mark.line]:
        return f"{where}: there is a tab in this line; YAML is indented with spaces only"
    return f"{where}: not valid YAML: {_yaml_problem(error)}"


def _assign(data: dict[str, Any], key: KeyPath, value: Any, override: str) -> None:
    target = data
    for depth, part in enumerate(key[:-1]):
        if target.get(part) is None:
            target[part] = {}
        target = target[part]
        if not isinstance(target, dict):
            raise ConfigError(
                [f"--set {override}: {'.'.join(key[: depth + 1])} is a value, it has no key {key[depth + 1]!r}"]
            )
    target[key[-1]] = value


def _validate(data: dict[str, Any], origins: dict[KeyPath, str], source: str) -> RunConfig:
    try:
        # A section that is written but left empty ("training:") means its defaults.
        config = RunConfig.model_validate({k: ({} if v is None else v) for k, v in data.items()})
    except ValidationError as error:
        raise ConfigError([_finding(e, origins, source) for e in error.errors()]) from None
    findings = impossible_combinations(config)
    if findings:
        raise ConfigError([f"{_origin(key, origins, source)}: {'.'.join(key)}: {message}" for key, message in findings])
    return config


def _origin(key: KeyPath, origins: dict[KeyPath, str], source: str) -> str:
    for length in range(len(key), 0, -1):
        if key[:length] in origins:
            return origins[key[:length]]
    return source


def _finding(error: Any, origins: dict[KeyPath, str], source: str) -> str:
    # pydantic adds the branch of a union ("int", "literal['auto']") to the location: only real keys are kept.
    key, model = _resolve(error["loc"])
    where = f"{_origin(key, origins, source)}: {'.'.join(key)}"
    if error["type"] == "extra_forbidden":
        names = list(model.model_fields)
        near = difflib.get_close_matches(key[-1], names, n=1, cutoff=0.5)
        return f"{where}: unknown key; " + (
            f"did you mean {near[0]!r}?" if near else f"known keys here: {', '.join(names)}"
        )
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{where}: {message}"
    return f"{where}: {message[0].lower()}{message[1:]} (got {_kind(error['input'])})"


def _resolve(loc: tuple[Any, ...]) -> tuple[KeyPath, type[BaseModel]]:
    """Returns the keys of the file in a pydantic location, and the section that should hold the last one."""
    model: type[BaseModel] = RunConfig
    key: list[str] = []
    for part in loc:
        name = str(part)
        known = model.model_fields.get(name)
        if known is None:
            if not key or part == loc[-1] and isinstance(part, str) and len(key) < 2 and not _is_union_branch(name):
                key.append(name)
            break
        key.append(name)
        child = next(
            (
                a
                for a in (known.annotation, *get_args(known.annotation))
                if isinstance(a, type) and issubclass(a, Section)
            ),
            None,
        )
        if child is None:
            break
        model = child
    return tuple(key), model


def _is_union_branch(name: str) -> bool:
    return name in {"int", "str", "float", "bool", "none"} or "[" in name


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return f"a list: {value!r}"[:80]
    if isinstance(value, dict):
        return f"a mapping with keys {', '.join(map(str, value))}"[:80] if value else "an empty mapping"
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return f"the text {value!r}"[:80]
    return f"{value!r}"[:80]
