"""Every alert, with promtool: it fires on its fault, and stays quiet just on the good side of it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.system.monitoring_faults import INJECTED
from tests.unit.monitoring.tools import CHECKOUT, needs, rule_files

CASES: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "rule_cases.yml").read_text())
ALERTS = {
    rule["alert"]: rule
    for path in rule_files()
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
}
# The file of each alert; the others' rules need not run in its test.
HOME = {name: next(path for path in rule_files() if f"alert: {name}\n" in path.read_text()) for name in ALERTS}
SHARED = [str(path) for path in rule_files() if path.stem in ("limits", "recording")]
SEVERITIES = {"info", "warning", "critical"}
ACTIONS = {"none", "checkpoint", "drain"}


def promtool_test(alert: str, series: dict[str, str], at: str, expected: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "interval": "1m",
        "name": alert,
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})',
                "eval_time": at,
                "exp_samples": expected,
            }
        ],
    }


@needs("promtool")
def test_rules_are_valid() -> None:
    outcome = subprocess.run(
        ["promtool", "check", "rules", *map(str, rule_files())], capture_output=True, text=True, timeout=60, check=False
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


@needs("promtool")
@pytest.mark.parametrize("kind", ["fires", "quiet"])
def test_alerts_fire_on_their_fault_and_only_then(kind: str, tmp_path: Path) -> None:
    expected = [{"labels": "{}", "value": 1}] if kind == "fires" else []
    files = []
    for rules in rule_files():
        tests = [promtool_test(n, c[kind], c["at"], expected) for n, c in CASES.items() if HOME[n] == rules]
        if tests:
            file = tmp_path / f"{rules.stem}.yml"
            file.write_text(yaml.safe_dump({"rule_files": [*SHARED, str(rules)], "tests": tests}))
            files.append(str(file))
    outcome = subprocess.run(
        ["promtool", "test", "rules", *files], capture_output=True, text=True, timeout=60, check=False
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


@needs("promtool")
def test_a_case_that_expects_too_much_fails(tmp_path: Path) -> None:
    case = CASES["GpuHung"]
    test = promtool_test("GpuHung", case["quiet"], case["at"], [{"labels": "{}", "value": 1}])
    file = tmp_path / "wrong.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(p) for p in rule_files()], "tests": [test]}))
    outcome = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, timeout=60, check=False)
    assert outcome.returncode == 1


def test_each_alert_has_a_case() -> None:
    assert set(CASES) == set(ALERTS)


@pytest.mark.parametrize("name", ALERTS)
def test_each_alert_says_what_to_do(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in SEVERITIES
    assert rule["labels"]["action"] in ACTIONS
    assert set(rule["annotations"]) == {"summary", "causes", "runbook_url"}
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    headings = re.findall(r"^## (\w+)$", (CHECKOUT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert anchor == name.lower()
    assert name in headings, f"{page} has no section {name}"


def test_runbooks_have_no_section_without_an_alert() -> None:
    for page in (CHECKOUT / "docs" / "runbooks").glob("*.md"):
        for heading in re.findall(r"^## (\w+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert heading in ALERTS, f"{page.name}: {heading}"


def test_each_alert_is_set_off_on_the_whole_way() -> None:
    """The system tests work through this list; an alert that is not in it would be one that nobody has seen."""
    assert len(set(INJECTED)) == len(INJECTED)
    assert set(INJECTED) == set(ALERTS)
