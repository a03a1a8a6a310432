"""Alertmanager: the file is valid, and each kind of alert reaches those it should."""

from __future__ import annotations

import subprocess

import pytest

from tests.unit.monitoring.tools import MONITORING, needs

CONFIG = str(MONITORING / "alertmanager" / "alertmanager.yml")
pytestmark = needs("amtool")


def test_configuration_is_valid() -> None:
    outcome = subprocess.run(
        ["amtool", "check-config", CONFIG], capture_output=True, text=True, timeout=30, check=False
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


@pytest.mark.parametrize(
    ("labels", "receivers"),
    [
        (["severity=critical", "action=drain", "alertname=GpuXidFatal"], "actions,page"),
        (["severity=warning", "action=checkpoint", "alertname=SpotNotice"], "actions,notify"),
        (["severity=critical", "action=none", "alertname=RunFailed"], "page"),
        (["severity=warning", "action=none", "alertname=DataWaitHigh"], "notify"),
        (["severity=info", "action=none", "alertname=GpuXidApplication"], "record"),
        (["alertname=SomethingElse"], "notify"),
    ],
)
def test_alerts_reach_their_receivers(labels: list[str], receivers: str) -> None:
    command = [
        "amtool",
        "config",
        "routes",
        "test",
        f"--config.file={CONFIG}",
        f"--verify.receivers={receivers}",
        *labels,
    ]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_a_wrong_route_would_be_seen() -> None:
    command = [
        "amtool",
        "config",
        "routes",
        "test",
        f"--config.file={CONFIG}",
        "--verify.receivers=page",
        "severity=info",
    ]
    assert subprocess.run(command, capture_output=True, timeout=30, check=False).returncode != 0
