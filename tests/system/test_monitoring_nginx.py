"""Port 8888: who may come, and what is passed on, with a real nginx and a real Prometheus behind it."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.errors import RunFailedError
from launch.monitor import Monitor
from launch.monitor_files import CHECKOUT, Layout
from tests.system.monitoring_live import free_ports, wait_for
from tests.unit.monitoring.tools import needs

pytestmark = [pytest.mark.system, needs("prometheus", "prometheus-alertmanager")]

# What `fab monitor` does, with ports that are free here.
PROGRAM = """
import sys
from pathlib import Path
from launch.monitor import run_monitor
from launch.monitor_files import Layout, Ports
root = Path(sys.argv[1])
run_monitor(Layout(root / "runs", root / "state", Ports(*map(int, sys.argv[2:]))))
"""


@pytest.fixture(scope="module")
def monitor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitor]:
    if not any(os.access(path, os.X_OK) for path in ("/usr/sbin/nginx", "/usr/bin/nginx")):
        pytest.skip("nginx is not installed")
    root = tmp_path_factory.mktemp("nginx")
    with Monitor(Layout(root / "runs", root / "state", free_ports()), tell=lambda _: None) as running:
        yield running


def status(monitor: Monitor, path: str, source: str = "127.0.0.1") -> int:
    """Asks for `path` from an address of this host."""
    connection = http.client.HTTPConnection(
        "127.0.0.1", monitor.layout.ports.web, timeout=10, source_address=(source, 0)
    )
    connection.request("GET", path)
    code = connection.getresponse().status
    connection.close()
    return code


def test_only_listed_addresses_come_in(monitor: Monitor) -> None:
    assert status(monitor, "/prometheus/api/v1/query?query=1") == 200
    assert status(monitor, "/prometheus/api/v1/query?query=1", source="127.0.0.2") == 403
    assert status(monitor, "/", source="127.0.0.2") == 403


def test_what_changes_prometheus_is_not_passed_on(monitor: Monitor) -> None:
    assert status(monitor, "/prometheus/api/v1/admin/tsdb/snapshot") == 403
    assert status(monitor, "/prometheus/-/quit") == 403


def test_without_grafana_its_part_says_so(monitor: Monitor) -> None:
    if "Grafana" not in monitor.addresses():
        assert status(monitor, "/") == 502


def test_everything_listens_on_loopback(monitor: Monitor) -> None:
    ports = {f"{port:04X}" for port in vars(monitor.layout.ports).values()}
    for table, loopback in (("/proc/net/tcp", "0100007F"), ("/proc/net/tcp6", "")):
        for line in Path(table).read_text().splitlines()[1:]:
            address, port = line.split()[1].split(":")
            if port in ports and line.split()[3] == "0A":
                assert address == loopback, f"{table}: {address}:{port}"


def test_a_program_that_dies_ends_the_monitor_with_its_name(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "runs", tmp_path / "state", free_ports())
    with Monitor(layout, tell=lambda _: None) as running:
        (prometheus,) = [child for program, child in running._children if program.name == "prometheus"]
        prometheus.kill()
        prometheus.wait(10)
        with pytest.raises(RunFailedError, match="prometheus has ended"):
            running.poll()
        children = [child for _, child in running._children]
    assert all(child.poll() is not None for child in children)


def test_a_broken_rule_stops_the_start_and_leaves_nothing(tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.mkdir()
    (rules / "broken.yml").write_text("groups: [{name: a, rules: [{alert: A, expr: 'sum('}]}]")
    layout = Layout(tmp_path / "runs", tmp_path / "state", free_ports(), rules=rules)
    with pytest.raises(RunFailedError, match="prometheus does not start") as caught, Monitor(layout):
        pass
    assert "prometheus.log" in caught.value.remedy
    assert "broken.yml" in (layout.state_dir / "logs" / "prometheus.log").read_text()
    wait_for(lambda: not _listens(layout.ports.alertmanager), "end of Alertmanager", 10)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_whatever_ends_it_nothing_goes_on(ending: signal.Signals, tmp_path: Path) -> None:
    ports = free_ports()
    numbers = [str(port) for port in vars(ports).values()]
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", PROGRAM, str(tmp_path), *numbers],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    said = [process.stdout.readline()]
    while said[-1] and "watching" not in said[-1]:
        said.append(process.stdout.readline())
    assert any(line.startswith("Prometheus: http://127.0.0.1:") for line in said), process.communicate()
    process.send_signal(ending)
    out, errors = process.communicate(timeout=30)
    if ending != signal.SIGKILL:
        assert process.returncode == 0
        assert out == "ended\n"
        assert errors == ""
    for port in vars(ports).values():
        wait_for(lambda port=port: not _listens(port), f"end of what listened on {port}", 10)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_files_of_a_cluster_are_valid(tmp_path: Path) -> None:
    """monitoring/nginx as it is copied to a control host."""
    nginx = "/usr/sbin/nginx" if os.access("/usr/sbin/nginx", os.X_OK) else "nginx"
    source = Path(__file__).resolve().parents[2] / "monitoring" / "nginx"
    for name in ("loopworks.conf", "loopworks-allow.conf"):
        (tmp_path / name).write_text((source / name).read_text())
    (tmp_path / "nginx.conf").write_text(
        f"pid {tmp_path}/pid;\nevents {{}}\nhttp {{ access_log off; include {tmp_path}/loopworks.conf; }}\n"
    )
    command = [nginx, "-t", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf"), "-e", "stderr"]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert outcome.returncode == 0, outcome.stderr
