"""Receives alerts from Alertmanager and does what they ask for: a checkpoint of a run, or the draining of a node.

`decide` turns a message into actions and knows nothing of the world; `Actions` carries them out. Nothing is done twice
for the same alert. Only loopback is listened to, and only names that a run or a node can have are taken from a message.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

from launch.run_metrics import seen_state
from launch.runs import LIVE, list_runs

MAX_MESSAGE_BYTES = 1 << 20
CLIENT_TIMEOUT_S = 10.0
COMMAND_TIMEOUT_S = 60.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")

Drainer = Literal["list", "slurm", "kubernetes"]


@dataclass(frozen=True)
class Action:
    """What an alert asks for: `checkpoint` of run `target`, or `drain` of node `target`."""

    kind: Literal["checkpoint", "drain"]
    target: str
    reason: str
    fingerprint: str


def decide(message: dict[str, Any]) -> list[Action]:
    """Returns the actions that a message of Alertmanager (webhook version 4) asks for.

    Resolved alerts, alerts without an action and names that no run or node can have ask for nothing.
    """
    actions = []
    for alert in message.get("alerts", []):
        labels = alert.get("labels", {})
        kind = labels.get("action")
        target = labels.get({"checkpoint": "run", "drain": "node"}.get(kind, ""), "")
        if alert.get("status") != "firing" or not _NAME.fullmatch(target):
            continue
        actions.append(Action(kind, target, str(labels.get("alertname", "alert")), f"{alert.get('fingerprint', '')}"))
    return actions


def drain_command(drainer: Drainer, node: str, reason: str) -> list[str] | None:
    """Returns the command that takes a node out of service; None when a list in a file is kept instead."""
    if drainer == "slurm":
        return ["scontrol", "update", f"nodename={node}", "state=drain", f"reason=alert: {reason}"]
    if drainer == "kubernetes":
        return ["kubectl", "cordon", node]
    return None


class Actions:
    """Carries actions out, each alert's once, and tells what it did."""

    def __init__(
        self, runs_dirs: Sequence[Path], state_dir: Path, drainer: Drainer, tell: Callable[[str], None]
    ) -> None:
        self._runs_dirs, self._drainer, self._tell = runs_dirs, drainer, tell
        self.drained = state_dir / "drained.jsonl"
        self._done: set[tuple[str, str]] = set()

    def carry_out(self, actions: Iterable[Action]) -> list[str]:
        """Does what has not been done yet; returns a line for each action done."""
        lines = []
        for action in actions:
            key = (action.fingerprint, action.kind)
            if key in self._done:
                continue
            line = self._checkpoint(action) if action.kind == "checkpoint" else self._drain(action)
            self._done.add(key)
            self._tell(line)
            lines.append(line)
        return lines

    def _checkpoint(self, action: Action) -> str:
        for folder in (run for runs_dir in self._runs_dirs for run in list_runs(runs_dir)):
            if folder.name == action.target and seen_state(folder).phase in LIVE:
                # Read by the run's rank 0 after its step (training/metrics.py, SaveRequests).
                (folder.path / "save.request").write_text(action.reason + "\n", encoding="utf-8")
                return f"{action.reason}: asked run {action.target} for a checkpoint"
        return f"{action.reason}: run {action.target} is not running here; no checkpoint asked for"

    def _drain(self, action: Action) -> str:
        command = drain_command(self._drainer, action.target, action.reason)
        if command is None:
            record = {"node": action.target, "reason": action.reason, "time": time.time()}
            with self.drained.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            return f"{action.reason}: node {action.target} noted as drained in {self.drained}"
        try:
            outcome = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=COMMAND_TIMEOUT_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{action.reason}: node {action.target} could not be drained: {error}"
        said = (outcome.stderr or outcome.stdout).strip()
        return f"{action.reason}: node {action.target} " + (
            "drained" if outcome.returncode == 0 else f"not drained: {said}"
        )


def alert_lines(message: dict[str, Any]) -> list[str]:
    """Returns one line an alert, for a person."""
    lines = []
    for alert in message.get("alerts", []):
        labels, notes = alert.get("labels", {}), alert.get("annotations", {})
        state = "FIRING" if alert.get("status") == "firing" else "resolved"
        lines.append(f"{state} {labels.get('severity', '')} {labels.get('alertname', '')}: {notes.get('summary', '')}")
    return lines


class WebhookServer(ThreadingHTTPServer):
    """Takes POST /alerts (told and recorded) and POST /actions (carried out too); GET goes to `get`."""

    daemon_threads = True

    def __init__(
        self, port: int, record: Path, actions: Actions, tell: Callable[[str], None], get: Callable[[str], bytes | None]
    ) -> None:
        self.record, self.actions, self.tell, self.get = record, actions, tell, get
        super().__init__(("127.0.0.1", port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away before it had its answer is no fault; anything else is told."""
        error = sys.exc_info()[1]
        if not isinstance(error, (ConnectionError, TimeoutError)):
            self.tell(f"a request could not be answered: {type(error).__name__}: {error}")

    def take(self, path: str, message: dict[str, Any]) -> None:
        """Records a message and does what it asks for."""
        if path == "/actions":
            self.actions.carry_out(decide(message))
            return
        with self.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(message) + "\n")
        for line in alert_lines(message):
            self.tell(line)


class _Handler(BaseHTTPRequestHandler):
    server: WebhookServer
    timeout = CLIENT_TIMEOUT_S

    def do_POST(self) -> None:
        size = self.headers.get("Content-Length", "")
        if self.path not in ("/alerts", "/actions") or not size.isdigit() or int(size) > MAX_MESSAGE_BYTES:
            self.send_error(404 if size.isdigit() else 411)
            return
        try:
            message = json.loads(self.rfile.read(int(size)))
            if not isinstance(message, dict):
                raise ValueError("not an object")
            self.server.take(self.path, message)
        except (ValueError, AttributeError, TypeError) as error:
            self.send_error(400, f"not a message of Alertmanager: {type(error).__name__}")
            return
        except OSError as error:
            # Alertmanager tries again after a 5xx answer.
            self.server.tell(f"an alert could not be served: {error.filename}: {error.strerror}")
            self.send_error(503, f"cannot be carried out now: {error.strerror}")
            return
        self.send_response(204)
        self.end_headers()

    def do_GET(self) -> None:
        page = self.server.get(self.path)
        if page is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the base class's name)
        """Requests are not logged; what they lead to is told."""
