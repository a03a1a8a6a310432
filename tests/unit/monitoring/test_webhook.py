"""The receiver of alerts: what an alert may ask for, and what reaches the world."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.webhook import Action, Actions, WebhookServer, alert_lines, decide, drain_command
from training.records import RunFolder, RunState


def alert(status: str = "firing", fingerprint: str = "f1", **labels: str) -> dict[str, Any]:
    return {
        "status": status,
        "labels": {"alertname": "A", "severity": "critical", **labels},
        "fingerprint": fingerprint,
    }


def message(*alerts: dict[str, Any]) -> dict[str, Any]:
    return {"version": "4", "alerts": list(alerts)}


def test_alerts_ask_for_what_their_label_says() -> None:
    found = decide(message(alert(action="drain", node="gpu1"), alert(action="checkpoint", run="r", fingerprint="f2")))
    assert found == [Action("drain", "gpu1", "A", "f1"), Action("checkpoint", "r", "A", "f2")]


@pytest.mark.parametrize(
    "labels",
    [
        {"action": "none", "node": "gpu1"},
        {"action": "drain"},
        {"action": "drain", "node": "x; reboot"},
        {"action": "drain", "node": "-option"},
        {"action": "drain", "node": "../../etc"},
        {"action": "reboot", "node": "gpu1"},
    ],
)
def test_nothing_else_asks_for_anything(labels: dict[str, str]) -> None:
    assert decide(message(alert(**labels))) == []


def test_a_resolved_alert_asks_for_nothing() -> None:
    assert decide(message(alert(status="resolved", action="drain", node="gpu1"))) == []


@given(st.text())
def test_no_target_can_be_an_option_or_a_path(node: str) -> None:
    for action in decide(message(alert(action="drain", node=node))):
        assert not action.target.startswith("-")
        assert "/" not in action.target
        assert not set(action.target) & set(" ;|&$`\n")


def test_drain_commands() -> None:
    assert drain_command("slurm", "n1", "GpuXidFatal") == [
        *("scontrol", "update", "nodename=n1", "state=drain", "reason=alert: GpuXidFatal")
    ]
    assert drain_command("kubernetes", "n1", "x") == ["kubectl", "cordon", "n1"]
    assert drain_command("list", "n1", "x") is None


@pytest.fixture
def actions(tmp_path: Path) -> Actions:
    (tmp_path / "runs").mkdir()
    return Actions([tmp_path / "none", tmp_path / "runs"], tmp_path, "list", lambda _: None)


def test_a_running_run_is_asked_for_a_checkpoint_once(actions: Actions, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "r")
    folder.path.mkdir()
    folder.config.write_text("")
    own = psutil.Process()
    folder.write_state(
        RunState(name="r", phase="training", launcher_pid=own.pid, launcher_start=own.create_time(), started=1.0)
    )
    asked = Action("checkpoint", "r", "SpotNotice", "f")
    (line,) = actions.carry_out([asked, asked])
    assert "asked run r" in line
    assert (folder.path / "save.request").read_text() == "SpotNotice\n"
    assert actions.carry_out([asked]) == []
    (line,) = actions.carry_out([Action("checkpoint", "gone", "SpotNotice", "g")])
    assert "not running" in line


def test_a_drained_node_is_noted(actions: Actions) -> None:
    actions.carry_out([Action("drain", "gpu1", "GpuXidFatal", "f")])
    (entry,) = [json.loads(line) for line in actions.drained.read_text().splitlines()]
    assert (entry["node"], entry["reason"]) == ("gpu1", "GpuXidFatal")


def test_a_command_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (line,) = Actions([tmp_path], tmp_path, "slurm", lambda _: None).carry_out([Action("drain", "n1", "x", "f")])
    assert "could not be drained" in line


@pytest.fixture
def server(actions: Actions, tmp_path: Path) -> Iterator[tuple[WebhookServer, list[str]]]:
    told: list[str] = []
    made = WebhookServer(0, tmp_path / "alerts.jsonl", actions, told.append, lambda p: b"x 1\n" if p == "/m" else None)
    thread = threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield made, told
    made.shutdown()
    made.server_close()


def post(server: WebhookServer, path: str, body: bytes) -> int:
    url = f"http://127.0.0.1:{server.server_address[1]}{path}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_messages_are_recorded_and_told(server: tuple[WebhookServer, list[str]], tmp_path: Path) -> None:
    receiver, told = server
    assert post(receiver, "/alerts", json.dumps(message(alert())).encode()) == 204
    assert post(receiver, "/actions", json.dumps(message(alert(action="drain", node="n1"))).encode()) == 204
    assert told == ["FIRING critical A: "]
    assert len((tmp_path / "alerts.jsonl").read_text().splitlines()) == 1
    assert receiver.actions.drained.exists()


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/alerts", b"{broken", 400),
        ("/alerts", b"[]", 400),
        ("/actions", b'{"alerts": [1]}', 400),
        ("/elsewhere", b"{}", 404),
        ("/alerts", b" " * ((1 << 20) + 1), 404),
    ],
    ids=["broken", "list", "no alert", "path", "too long"],
)
def test_what_is_not_a_message_is_refused(
    server: tuple[WebhookServer, list[str]], path: str, body: bytes, status: int
) -> None:
    try:
        assert post(server[0], path, body) == status
    except urllib.error.URLError:
        assert len(body) > 1 << 20  # refused before it was read


def test_a_full_disk_lets_alertmanager_try_again(server: tuple[WebhookServer, list[str]], tmp_path: Path) -> None:
    (tmp_path / "alerts.jsonl").mkdir()
    assert post(server[0], "/alerts", json.dumps(message(alert())).encode()) == 503


def test_metrics_are_served_beside(server: tuple[WebhookServer, list[str]]) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{server[0].server_address[1]}/m", timeout=5) as answer:
        assert answer.read() == b"x 1\n"


def test_a_client_that_goes_away_is_no_fault_and_a_broken_page_is_told(
    server: tuple[WebhookServer, list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    receiver, told = server

    def broken(_: str) -> bytes:
        raise RuntimeError("no such run")

    for page, lines in ((lambda _: b"x" * 50_000_000, []), (broken, ["a request could not be answered"])):
        receiver.get = page
        client = socket.create_connection(receiver.server_address[:2])
        client.sendall(b"GET /m HTTP/1.0\r\n\r\n")
        # Closing at once resets the connection while the answer is on its way.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.recv(1)
        client.close()
        deadline = time.monotonic() + 10
        while len(told) < len(lines):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert [line.split(":")[0] for line in told] == ["a request could not be answered"]
    assert "Traceback" not in capfd.readouterr().err


def test_lines_for_a_person() -> None:
    resolved = {**alert(status="resolved"), "annotations": {"summary": "over"}}
    assert alert_lines(message(resolved)) == ["resolved critical A: over"]
