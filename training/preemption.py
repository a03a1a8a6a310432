"""Leaving in time: signals and notices of the cloud set a flag, all ranks agree on it at the end of a step.

    SIGTERM, SIGUSR1 to any rank ─┐
    spot interruption of any node ┼─> StopFlag of that rank ──> vote at the end of the step ──> all ranks save and
    drain mark on any node ───────┘                                                             leave together

A rebalance recommendation asks for a save only. The handler only sets the flag, so a signal can come at any moment, and
a second one during the save changes nothing. `leaving` says that the node itself goes: who starts the run again does so
without it (training/heartbeat.py carries it there).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.drain import drain_reason
from training.errors import EXIT_PREEMPTED

# A pod that ends with 0 after SIGTERM counts as done; 128 + 15 tells Kubernetes that it was stopped.
EXIT_TERMINATED = 143
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
METADATA_URL = "http://169.254.169.254"
POLL_INTERVAL_S = 5.0  # the interval that AWS advises
DRAIN_INTERVAL_S = 1.0
_TOKEN_SECONDS = "21600"


class StopFlag:
    """What this rank has been asked to do. Setting it is safe from signal handlers and threads."""

    def __init__(self) -> None:
        self.reason = ""
        self.stop = False
        self.save = False
        self.leaving = ""

    def request_stop(self, reason: str) -> None:
        """Asks for a save and the end of the run; the first reason is kept."""
        if not self.stop:
            self.reason, self.stop = reason, True

    def request_leave(self, reason: str) -> None:
        """Asks for a stop because this node is taken away or drained: another start has to do without it."""
        self.leaving = self.leaving or reason
        self.request_stop(reason)

    def request_save(self, reason: str) -> None:
        """Asks for a save, after which the run goes on."""
        if not self.save:
            self.reason, self.save = self.reason or reason, True

    def saved(self) -> None:
        """Says that a save has answered `request_save`."""
        self.save = False


@contextlib.contextmanager
def signals_request_stop(flag: StopFlag) -> Iterator[None]:
    """Inside the block SIGTERM and SIGUSR1 set `flag` and interrupt nothing. Main thread only."""

    def handle(number: int, frame: Any) -> None:
        flag.request_stop(f"signal {signal.Signals(number).name}")

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code(environment: Mapping[str, str] = os.environ) -> int:
    """Returns what a preempted process ends with: 75, or 143 under Kubernetes."""
    return EXIT_TERMINATED if "KUBERNETES_SERVICE_HOST" in environment else EXIT_PREEMPTED


@dataclass(frozen=True)
class Notice:
    """What the metadata service has announced: `kind` interruption (the node goes) or rebalance (it may go soon)."""

    kind: str
    text: str


def read_notice(get: Callable[[str], str | None]) -> Notice | None:
    """Returns what is announced; `get` returns the text of a metadata path, or None where there is none (404)."""
    action = get("/latest/meta-data/spot/instance-action")
    if action is not None:
        found = _json(action)
        text = f"spot {found.get('action', 'interruption')} at {found.get('time', 'an unknown time')}"
        return Notice("interruption", text)
    rebalance = get("/latest/meta-data/events/recommendations/rebalance")
    if rebalance is not None:
        return Notice("rebalance", f"rebalance recommended at {_json(rebalance).get('noticeTime', 'an unknown time')}")
    return None


def on_ec2(vendor_file: Path = Path("/sys/class/dmi/id/sys_vendor")) -> bool:
    """Whether this machine is an EC2 instance, as its firmware says; nothing is asked over the network."""
    try:
        return vendor_file.read_text(encoding="ascii", errors="replace").strip() == "Amazon EC2"
    except OSError:
        return False


class DrainWatcher:
    """A thread that looks for the drain mark of this node and raises it in a StopFlag."""

    def __init__(self, flag: StopFlag, mark: Path, interval_s: float = DRAIN_INTERVAL_S) -> None:
        self._flag, self._mark, self._interval_s = flag, mark, interval_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drain", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._end.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while (reason := drain_reason(self._mark)) is None:
            if self._end.wait(self._interval_s):
                return
        self._flag.request_leave(f"drained: {reason}")


class MetadataWatcher:
    """A thread that polls the EC2 metadata service (IMDSv2) of this node and raises what it announces in a StopFlag.

    An interruption makes the run leave this node, a rebalance recommendation asks for a save. A machine without the
    service is left alone after `attempts` tries; a service that stops answering later is asked again, as long as the
    run lasts.
    """

    def __init__(
        self,
        flag: StopFlag,
        url: str = METADATA_URL,
        interval_s: float = POLL_INTERVAL_S,
        attempts: int = 3,
        timeout_s: float = 2.0,
    ) -> None:
        self._flag, self._url, self._interval_s = flag, url.rstrip("/"), interval_s
        self._attempts, self._timeout_s = attempts, timeout_s
        self._token = ""
        self._rebalance_seen = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metadata", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it still watches."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Ends the thread."""
        self._end.set()
        self._thread.join(self._timeout_s + 1)

    def _run(self) -> None:
        answered, failures = False, 0
        while True:
            try:
                self._look()
                answered = True
            except (OSError, ValueError):
                failures += 1
                if not answered and failures >= self._attempts:
                    return
            if self._flag.stop or self._end.wait(self._interval_s):
                return

    def _look(self) -> None:
        notice = read_notice(self._get)
        if notice is None:
            return
        if notice.kind == "interruption":
            self._flag.request_leave(notice.text)
        elif not self._rebalance_seen:
            self._rebalance_seen = True
            self._flag.request_save(notice.text)

    def _get(self, path: str) -> str | None:
        """Returns the text at `path`; a token that has expired is renewed once."""
        for renew in (not self._token, True):
            if renew:
                headers = {"X-aws-ec2-metadata-token-ttl-seconds": _TOKEN_SECONDS}
                self._token = self._request("PUT", "/latest/api/token", headers)
            try:
                return self._request("GET", path, {"X-aws-ec2-metadata-token": self._token})
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    return None
                if error.code != 401 or renew:
                    raise
        return None

    def _request(self, method: str, path: str, headers: dict[str, str]) -> str:
        request = urllib.request.Request(self._url + path, method=method, headers=headers)
        # The address is of this machine: no proxy is asked.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=self._timeout_s) as answer:
            text: str = answer.read().decode()
        return text


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
