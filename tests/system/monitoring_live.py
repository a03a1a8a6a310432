"""What the monitoring tests share: rules whose minutes are half seconds, questions to Prometheus, and runs to watch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from launch.monitor_files import MONITORING, Layout, Ports
from launch.processes import processes_of
from tests.system.conftest import CHECKOUT
from training.records import RunFolder

_UNITS = {"ms": 1 / 1000, "s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"(\[|offset |for: )(\d+)(ms|s|m|h)\b")
# Seconds, in place of those of rules/limits.yml.
LIMITS = {
    "phase: starting": 60,
    "phase: training": 6,
    "phase: evaluating": 60,
    "phase: saving": 60,
    "limit:checkpoint_age_seconds": 15,
    "limit:node_report_seconds": 3,
}
FACTOR = 120
# The longest windows are shortened more; those in which a busy machine has to do several steps, or starts, less.
FACTORS = {"TrainingLossNotFalling": 480, "run:phase:ratio5m": 40, "RunRestarting": 6}
# Numbers within expressions that are times.
TIMES = {"train_wall_seconds > 7200": "train_wall_seconds > 25"}


def faster(text: str) -> str:
    """Returns rules of which every window, offset and `for` is shorter by a factor; expressions stay as they are."""
    factor, lines = FACTOR, []

    def shorter(match: re.Match[str]) -> str:
        return f"{match[1]}{max(1, round(int(match[2]) * _UNITS[match[3]] * 1000 / factor))}ms"

    for before, after in TIMES.items():
        text = text.replace(before, after)
    for line in text.splitlines():
        if named := re.search(r"(?:alert|record): (\S+)", line):
            factor = FACTORS.get(named[1], FACTOR)
        quick = _DURATION.sub(shorter, line)
        limit = next((seconds for name, seconds in LIMITS.items() if name in line and "vector(" in line), None)
        lines.append(quick if limit is None else re.sub(r"vector\(\d+\)", f"vector({limit})", quick))
    return "\n".join(lines) + "\n"


def free_ports() -> Ports:
    """Returns five ports that are free now."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(5)]
        return Ports(*(server.getsockname()[1] for server in made))


def free_port() -> int:
    """Returns a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def fast_layout(runs_dir: Path, state_dir: Path) -> Layout:
    """Returns a layout whose rules are those of monitoring/rules in a hurry."""
    rules = state_dir / "rules"
    rules.mkdir(parents=True)
    for path in (MONITORING / "rules").glob("*.yml"):
        (rules / path.name).write_text(faster(path.read_text()))
    return Layout(runs_dir, state_dir, free_ports(), rules=rules, scrape_interval="500ms")


def query(layout: Layout, expression: str) -> list[dict[str, Any]]:
    """Returns what Prometheus answers to an instant query."""
    data = urllib.parse.urlencode({"query": expression}).encode()
    with urllib.request.urlopen(f"{layout.prometheus_url}/api/v1/query", data, timeout=10) as answer:
        result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return result


def firing(layout: Layout, **labels: str) -> set[str]:
    """Returns the names of the alerts that fire for `labels`."""
    chosen = "".join(f',{name}="{value}"' for name, value in labels.items())
    return {found["metric"]["alertname"] for found in query(layout, f'ALERTS{{alertstate="firing"{chosen}}}')}


def nodes_told(layout: Layout, alert: str) -> set[str]:
    """Returns the nodes for which an alert fires or has fired in the last minutes."""
    found = query(layout, f'max_over_time(ALERTS{{alertname="{alert}", alertstate="firing"}}[5m])')
    return {alert["metric"]["node"] for alert in found}


def active_alerts(layout: Layout) -> set[str]:
    """Returns the names of the alerts that Alertmanager has, whether it passes them on or holds them back."""
    url = f"http://127.0.0.1:{layout.ports.alertmanager}/api/v2/alerts"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return {alert["labels"]["alertname"] for alert in json.load(answer)}


def wait_for_alerts(layout: Layout, names: Iterable[str], timeout_s: float = 180, **labels: str) -> None:
    """Waits until each alert has fired in Prometheus and has reached Alertmanager; one may end while others begin."""
    missing = set(names)

    def all_seen() -> bool:
        missing.difference_update(firing(layout, **labels) & active_alerts(layout))
        return not missing

    try:
        wait_for(all_seen, "alerts", timeout_s)
    except AssertionError:
        raise AssertionError(f"alerts that did not fire: {sorted(missing)}") from None


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    """Polls until `condition` holds; fails with `what` otherwise."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {timeout_s} s"
        time.sleep(0.1)


@contextlib.contextmanager
def training(config: Path | None, run: RunFolder, *overrides: str, fault: str = "") -> Iterator[RunFolder]:
    """A run as `fab train` starts it, with the observers of monitoring; nothing of it is left afterwards.

    Without a configuration the run goes on, as with `fab train --resume`.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.system.monitoring_launch", str(config or "--resume"), run.name, *overrides],
        cwd=CHECKOUT,
        env={**os.environ, "MONITORING_FAULT": fault},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield run
    finally:
        for left in processes_of(str(run.path)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(left.pid, signal.SIGKILL)
        process.kill()
        process.wait()


def rank_pid(run: RunFolder, rank: int) -> int:
    """Returns the process id of a rank."""
    (found,) = [p for p in processes_of(str(run.path)) if p.environ().get("RANK") == str(rank)]
    return found.pid
