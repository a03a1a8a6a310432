"""The receiver of alerts as a service: what it says when it cannot listen, and how it begins and ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch import served
from launch.errors import UsageError
from launch.monitor import already_served
from launch.monitor_files import Layout, Ports
from launch.receiver import Receiver, run_receiver, tell_service_manager
from tests.unit.monitoring.tools import CHECKOUT


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "runs", tmp_path / "state", Ports(control=free_port()))


@pytest.fixture
def receiver(layout: Layout) -> Iterator[Receiver]:
    made = Receiver(layout, "list", lambda _: None)
    made.start()
    yield made
    made.stop()


def get(layout: Layout, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{layout.ports.control}{path}", timeout=5) as answer:
        return str(answer.read().decode())


def test_it_says_what_it_is_and_tells_of_the_runs(receiver: Receiver, layout: Layout) -> None:
    assert get(layout, "/").startswith(served.GREETING)
    assert str(layout.runs_dir) in get(layout, "/")
    assert "loopworks_run_phase" in get(layout, "/metrics")


def test_a_second_one_names_the_first(receiver: Receiver, layout: Layout) -> None:
    with pytest.raises(UsageError, match=f"port {layout.ports.control} is in use .* the receiver of alerts") as caught:
        run_receiver(layout, tell=lambda _: None)
    assert str(layout.runs_dir) in str(caught.value)
    assert caught.value.exit_code == 2


def test_another_program_on_the_port_is_not_taken_for_it(layout: Layout) -> None:
    with (
        socket.create_server(("127.0.0.1", layout.ports.control)),
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(UsageError, match="another program"),
    ):
        patch.setattr(served, "ANSWER_TIMEOUT_S", 0.1)
        run_receiver(layout, tell=lambda _: None)


def test_a_state_folder_that_cannot_be_is_said(layout: Layout) -> None:
    layout.state_dir.write_text("a file")
    with pytest.raises(UsageError, match="cannot write"):
        run_receiver(layout, tell=lambda _: None)


def test_a_machine_that_is_monitored_already_is_told_as_such(receiver: Receiver, layout: Layout) -> None:
    free = [free_port() for _ in range(4)]
    taken = served.served(Ports(free[0], free[1], layout.ports.control, free[2], free[3]))
    assert list(taken) == [layout.ports.control]
    told = str(already_served({9090: "Prometheus", **taken}))
    assert "monitored already" in told and "9090: Prometheus" in told and str(layout.runs_dir) in told
    assert "ports are in use" in str(already_served({9090: "another program"}))


def test_a_folder_that_cannot_be_read_is_told_once(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def broken(_: object) -> list[str]:
        raise OSError(116, "Stale file handle", "/shared/runs")

    monkeypatch.setattr("launch.receiver.withdraw_dead_targets", broken)
    receiver = Receiver(layout, "list", told.append)
    receiver.poll()
    receiver.poll()
    assert told == ["cannot look after /shared/runs: Stale file handle"]


@pytest.mark.parametrize("abstract", [False, True])
def test_the_service_manager_is_told(abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"loopworks-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}" if abstract else name)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}" if abstract else name)
        tell_service_manager("READY=1")
        manager.settimeout(5)
        assert manager.recv(100) == b"READY=1"
    monkeypatch.delenv("NOTIFY_SOCKET")
    tell_service_manager("READY=1")


def test_the_command_serves_until_it_is_ended(tmp_path: Path) -> None:
    """`fab monitor --receiver-only` with two folders, as the unit of a head starts it."""
    base, runs = free_port_base(), [tmp_path / "runs", tmp_path / "more"]
    folders = [word for folder in runs for word in ("--dir", str(folder))]
    command = [sys.executable, "-m", "fabric", "monitor", "--receiver-only", "--port-base", str(base), *folders]
    with subprocess.Popen(
        [*command, "--state", str(tmp_path / "state")],
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert f"127.0.0.1:{base + 2}/" in line and all(str(folder) in line for folder in runs)
            alert = {"status": "firing", "labels": {"alertname": "A", "severity": "critical"}, "fingerprint": "f"}
            body = json.dumps({"version": "4", "alerts": [alert]}).encode()
            with urllib.request.urlopen(f"http://127.0.0.1:{base + 2}/alerts", body, timeout=5) as answer:
                assert answer.status == 204
            assert process.stdout.readline() == "FIRING critical A: \n"
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "ended\n"
    assert process.returncode == 0
    assert json.loads((tmp_path / "state" / "alerts.jsonl").read_text())["alerts"] == [alert]


def free_port_base() -> int:
    """A number of which the third port from there is free."""
    return free_port() - 2
