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
from collections.abc import Callable, Iterator
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
}


def faster(text: str, factor: int = 120) -> str:
    """Returns rules of which every window, offset and `for` is shorter by `factor`; expressions stay as they are."""

    def shorter(match: re.Match[str]) -> str:
        return f"{match[1]}{max(1, round(int(match[2]) * _UNITS[match[3]] * 1000 / factor))}ms"

    lines = []
    for line in _DURATION.sub(shorter, text).splitlines():
        limit = next((seconds for name, seconds in LIMITS.items() if name in line and "vector(" in line), None)
        lines.append(line if limit is None else re.sub(r"vector\(\d+\)", f"vector({limit})", line))
    return "\n".join(lines) + "\n"


def free_ports() -> Ports:
    """Returns five ports that are free now."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(5)]
        return Ports(*(server.getsockname()[1] for server in made))


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


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    """Polls until `condition` holds; fails with `what` otherwise."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {timeout_s} s"
        time.sleep(0.1)


@contextlib.contextmanager
def training(config: Path, run: RunFolder, *overrides: str, fault: str = "") -> Iterator[RunFolder]:
    """A run as `fab train` starts it, with the observers of monitoring; nothing of it is left afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.system.monitoring_launch", str(config), run.name, *overrides],
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
