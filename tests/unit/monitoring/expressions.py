"""The PromQL of rules and dashboards, and the names of the series in it."""

from __future__ import annotations

import json
import re

import yaml

from tests.unit.monitoring.tools import MONITORING, rule_files

_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"')
_SELECTORS = re.compile(r"\{[^}]*\}")
_LABEL_LISTS = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_NAMES = re.compile(r"(?<![\w:.])([a-zA-Z_:][\w:]*)\b(?!\s*\()")
_DURATIONS = re.compile(r"\[[^\]]*\]|\boffset\s+\w+")
_WORDS = {"and", "or", "unless", "offset", "bool", "by", "on", "ignoring", "group_left", "without"}
_SUFFIXES = re.compile(r"_(bucket|sum|count)$")


def metric_names(expression: str) -> set[str]:
    """Returns the series that an expression reads; those of a histogram by its own name."""
    text = _STRINGS.sub('""', expression)
    for pattern in (_SELECTORS, _DURATIONS, _LABEL_LISTS):
        text = pattern.sub(" ", text)
    found = {name for name in _NAMES.findall(text) if name not in _WORDS}
    return {_SUFFIXES.sub("", name) if name.startswith("train_step_seconds_") else name for name in found}


def board_expressions() -> list[tuple[str, str]]:
    """Returns (where, PromQL) of all panels."""
    found = []
    for path in sorted((MONITORING / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            found += [(f"{path.stem}: {panel['title']}", target["expr"]) for target in panel.get("targets", [])]
    return found


def rule_expressions() -> list[tuple[str, str]]:
    """Returns (rule, PromQL) of all rules."""
    rules = [
        rule for path in rule_files() for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]
    ]
    return [(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules]


def rule_names() -> set[str]:
    """Returns the names of the series that recording rules make."""
    return {name for name, _ in rule_expressions() if ":" in name}
