"""The agents of a run watch each other: who is not heard for LEASE_S is lost, and then all end their ranks.

The first node's agent listens; every other one says each second how it is, and hears how the run is. So a dead host,
a cut network or a hang ends the run everywhere, whether a supervisor is watching or not.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from launch.errors import UsageError

LEASE_S = 15.0
# Another length: for tests, and for networks that pause for longer.
LEASE_VARIABLE = "LOOPWORKS_LEASE_S"
# The first contact may take longer: agents are started one after another.
FIRST_CONTACT_S = 60.0
BEAT_S = 1.0
LINE_LIMIT_BYTES = 64 * 1024


def lease_s(environment: Mapping[str, str] = os.environ) -> float:
    """Returns for how long a node may be silent. Raises UsageError for what is no number of seconds."""
    text = environment.get(LEASE_VARIABLE) or str(LEASE_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 3 * BEAT_S <= seconds <= 3600:
        raise UsageError(f"{LEASE_VARIABLE}={text}: not a number of seconds from 3 to 3600", "leave it out for 15")
    return seconds


def lost_peers(
    seen: Mapping[str, float], peers: Sequence[str], began: float, now: float, lease: float = LEASE_S
) -> list[str]:
    """Returns the peers that are overdue at `now`; `seen` has the time when each was last heard."""
    return [peer for peer in peers if now - seen.get(peer, began) > (lease if peer in seen else FIRST_CONTACT_S)]


class Head:
    """The first node's side: hears the others and tells each what has been decided."""

    def __init__(self, port: int, token: str) -> None:
        self.seen: dict[str, float] = {}
        self.states: dict[str, dict[str, Any]] = {}
        self.verdict = ""
        self._token = token
        self._server = socket.create_server(("", port), backlog=256)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._server.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        peer.settimeout(LEASE_S)
        with contextlib.suppress(OSError, ValueError, KeyError), contextlib.closing(peer), peer.makefile("rb") as lines:
            while line := lines.readline(LINE_LIMIT_BYTES):
                message = json.loads(line)
                if message["token"] != self._token:
                    return
                self.seen[message["node"]] = time.monotonic()
                self.states[message["node"]] = message["state"]
                peer.sendall(json.dumps({"verdict": self.verdict}).encode() + b"\n")

    def close(self) -> None:
        """Stops listening."""
        self._server.close()


class Member:
    """Another node's side: says how it is, until `close`."""

    def __init__(self, address: str, port: int, node: str, token: str) -> None:
        self.seen: dict[str, float] = {}
        self.state: dict[str, Any] = {}
        self.verdict = ""
        self._message = {"node": node, "token": token}
        self._place = (address, port)
        self._closed = threading.Event()
        threading.Thread(target=self._talk, daemon=True).start()

    def _talk(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(OSError, ValueError):
                self._session()
            self._closed.wait(BEAT_S)

    def _session(self) -> None:
        with socket.create_connection(self._place, timeout=5) as head, head.makefile("rb") as lines:
            head.settimeout(LEASE_S / 2)
            while not self._closed.is_set():
                head.sendall(json.dumps({**self._message, "state": self.state}).encode() + b"\n")
                line = lines.readline(LINE_LIMIT_BYTES)
                if not line:
                    return
                self.seen["head"] = time.monotonic()
                self.verdict = json.loads(line)["verdict"]
                self._closed.wait(BEAT_S)

    def close(self) -> None:
        """Stops talking."""
        self._closed.set()
