"""Alerts about hardware, nodes, queue and budget: a real Prometheus and Alertmanager over stand-in exporters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.monitor import Monitor
from launch.report import write_report
from tests.system import monitoring_faults as faults
from tests.system.conftest import CHECKOUT
from tests.system.monitoring_live import (
    active_alerts,
    fast_layout,
    firing,
    query,
    wait_for,
    wait_for_alerts,
)
from tests.unit.launch.test_report import record
from tests.unit.monitoring.tools import needs
from training.records import RunFolder, RunState

pytestmark = [pytest.mark.system, needs("prometheus", "prometheus-alertmanager")]

HEALTHY_NODES = ("fine", "well")


class Site:
    """A monitor, the stand-in that it scrapes, and the faults that are there now."""

    def __init__(self, monitor: Monitor, faults_file: Path) -> None:
        self.monitor, self.layout, self._file = monitor, monitor.layout, faults_file

    def set(self, *names: str) -> None:
        """These faults and no others are there from now on."""
        temporary = self._file.with_suffix(".new")
        temporary.write_text("\n".join(names) + "\n")
        temporary.replace(self._file)

    def told(self) -> set[tuple[str, str]]:
        """(alert, node or run) of what fires."""
        found = query(self.layout, 'ALERTS{alertstate="firing"}')
        labels = [alert["metric"] for alert in found]
        return {
            (alert["alertname"], alert.get("node") or alert.get("run", "")) for alert in labels
        } - self._slow_rules()

    def _slow_rules(self) -> set[tuple[str, str]]:
        """On a machine that is too busy for rules every half second this alert is right; then, and only then."""
        slow = query(self.layout, "prometheus_rule_group_last_duration_seconds > 0.02")
        return {("RulesSlow", "")} if slow else set()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("alerts")
    address, faults_file = root / "address", root / "faults"
    faults_file.write_text("\n".join(faults.WITHOUT_FABRIC))
    standin = subprocess.Popen(
        [sys.executable, "-m", "tests.system.monitoring_standin", str(address), str(faults_file)], cwd=CHECKOUT
    )
    layout = fast_layout(root / "runs", root / "state")
    try:
        wait_for(lambda: address.is_file() and bool(address.read_text()), "stand-in")
        with Monitor(layout, tell=lambda _: None) as monitor:
            for node in (*HEALTHY_NODES, *faults.AT_THE_STANDIN):
                for origin in ("gpu", "node"):
                    labels = {"cluster": "c", "node": node, "__metrics_path__": f"/{origin}/{node}"}
                    entry = [{"targets": [address.read_text()], "labels": labels}]
                    (layout.state_dir / "targets" / origin / f"{node}.json").write_text(json.dumps(entry))
            yield Site(monitor, faults_file)
    finally:
        standin.terminate()
        standin.wait(10)


def test_a_fabric_that_nobody_reports_is_told(site: Site) -> None:
    wait_for_alerts(site.layout, faults.WITHOUT_FABRIC)
    assert {alert for alert, _ in site.told()} == set(faults.WITHOUT_FABRIC)
    site.set()
    wait_for(lambda: not site.told(), "end of the alert")


def test_nothing_fires_while_all_is_well(site: Site) -> None:
    nodes = len(HEALTHY_NODES) + len(faults.AT_THE_STANDIN)
    wait_for(lambda: len(query(site.layout, "loopworks_fabric_up == 1")) == nodes, "scraped nodes")
    began = time.time()
    # Longer than any window and `for` of the fast rules that looks at these series.
    wait_for(lambda: time.time() - began > 18 or bool(site.told()), "time to find fault")
    assert not site.told()


def test_each_fault_is_told_where_it_is_and_nowhere_else(site: Site) -> None:
    site.set(*faults.AT_THE_STANDIN)
    expected = {(alert, alert) for alert in faults.AT_THE_STANDIN}
    wait_for(lambda: site.told() >= expected, "alerts of all faults")
    assert site.told() == expected
    wait_for(lambda: active_alerts(site.layout) >= set(faults.AT_THE_STANDIN), "alerts at Alertmanager")
    drained = {json.loads(line)["node"] for line in (site.layout.state_dir / "drained.jsonl").read_text().splitlines()}
    assert drained == {"GpuXidFatal", "GpuEccUncorrectable", "GpuRowRemapFailure", "FabricPortDown"}


def test_the_page_of_a_run_shows_its_gpus(site: Site, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "GpuUtilizationLow")
    run.path.mkdir()
    run.config.write_text("monitoring:\n  cluster: c\n")
    run.write_state(RunState(name=run.name, phase="training", started=time.time() - 40))
    for age_s in range(30, -1, -1):
        run.append(record(31 - age_s, time=time.time() - age_s, step_s=1.0))
    page = write_report(run, prometheus=site.layout.prometheus_url).read_text()
    for title in (
        "GPU utilisation, %",
        "Tensor pipe active",
        "Power of all GPUs, W",
        "Fabric, bytes a second and node",
    ):
        assert f"<h2>{title}" in page
    assert "highest node" in page


def test_alerts_end_with_their_faults(site: Site) -> None:
    site.set()
    try:
        wait_for(lambda: not site.told(), "end of all alerts")
    except AssertionError:
        raise AssertionError(f"still told: {site.told()}") from None


def test_rules_that_are_slow_are_told(site: Site) -> None:
    heavy = {"record": "test:heavy", "expr": 'count(count_over_time({__name__=~".+"}[3m:100ms]))'}
    group = {"name": "heavy", "interval": "500ms", "rules": [heavy]}
    (site.layout.rules / "heavy.yml").write_text(json.dumps({"groups": [group]}))
    (prometheus,) = [child.pid for program, child in site.monitor._children if program.name == "prometheus"]
    os.kill(prometheus, signal.SIGHUP)
    wait_for_alerts(site.layout, faults.SLOW_RULES)
    assert "RulesSlow" in firing(site.layout)
