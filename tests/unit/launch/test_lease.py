"""The agents' lease over real sockets on loopback."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable

from launch.lease import Head, Member


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_members_are_heard_and_hear_the_verdict() -> None:
    port = free_port()
    early = Member("127.0.0.1", port, "b", "secret")  # before the head is there
    head = Head(port, "secret")
    late = Member("127.0.0.1", port, "c", "secret")
    try:
        late.state = {"phase": "ended", "code": 1}
        wait_for(lambda: head.states.get("c", {}).get("code") == 1 and "b" in head.seen)
        head.verdict = "c: torchrun ended with code 1"
        wait_for(lambda: early.verdict == late.verdict == head.verdict)
        assert "head" in early.seen
    finally:
        early.close()
        late.close()
        head.close()


def test_a_stranger_changes_nothing() -> None:
    port = free_port()
    head = Head(port, "secret")
    try:
        for line in (
            b"no json\n",
            json.dumps({"node": "b", "token": "wrong", "state": {"code": 1}}).encode() + b"\n",
            b"",
        ):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(line)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(100) == b""
        assert not head.seen
        assert not head.states
    finally:
        head.close()
