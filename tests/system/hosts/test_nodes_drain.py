"""Nodes that are to be left: drained before or during a run, taken away by the cloud. The run goes on without them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.system.hosts.cluster import Cluster, Host
from tests.system.hosts.conftest import LongRun, busy

pytestmark = pytest.mark.system
Call = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., LongRun]
MARK = "/var/lib/loopworks/drained"

# What EC2 answers on a node: a token, and a notice once there is one.
METADATA = """
import http.server, pathlib
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, text):
        self.send_response(200 if text else 404)
        self.end_headers()
        self.wfile.write(text.encode())
    def do_PUT(self):
        self.answer("token")
    def do_GET(self):
        notice = pathlib.Path("/root/notice")
        spot = self.path.endswith("spot/instance-action") and notice.exists()
        self.answer(notice.read_text() if spot else "")
    def log_message(self, *words):
        pass
http.server.HTTPServer(("127.0.0.1", 8169), Handler).serve_forever()
"""


def mark(host: Host, text: str) -> None:
    """As the upgrade playbook does."""
    host.ssh(f"mkdir -p /var/lib/loopworks && cat >{MARK} <<'END'\n{text}\nEND")


def unmark(host: Host) -> None:
    """On its disk: the host may be down."""
    (host.root / MARK.lstrip("/")).unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def no_marks(cluster: Cluster) -> Iterator[None]:
    yield
    for host in cluster.hosts:
        unmark(host)


@contextlib.contextmanager
def metadata_service(host: Host, python: str) -> Iterator[None]:
    """Inside the block the host has a metadata service."""
    (host.root / "root/metadata.py").write_text(METADATA)
    host.ssh(f"systemd-run --unit=metadata {python} /root/metadata.py")
    try:
        yield
    finally:
        host.ssh("systemctl stop metadata; rm -f /root/notice", check=False)


def events(run: LongRun, kind: str) -> list[str]:
    return [event.message for event in run.folder.read_events() if event.kind == kind]


def test_drained_nodes_are_replaced_before_and_during_a_run(
    call: Call, cluster: Cluster, shared: Path, shared_config: Path, long_run: Start
) -> None:
    first, second, third = cluster.hosts
    mark(second, '{"reason": "kernel upgrade", "by": "ansible"}')
    nodes = ("--nodes", "lwt1,lwt2", "--config", str(shared_config))
    refused = call("train", *nodes, "--name", "refused")
    assert refused.returncode == 3, refused.stderr
    assert "lwt2: drained: it is drained: kernel upgrade" in refused.stderr
    assert f"remove {MARK}" in refused.stderr
    assert not (shared / "runs" / "refused").exists()

    run = long_run("drained", "--nodes", "lwt1,lwt2", "--spares", "lwt3", "--restarts", "0")
    run.reaches(3)
    assert run.supervision()["active"] == ["lwt1", "lwt3"]

    # The upgrade goes on to the next node while the run is on it; the first one is back.
    unmark(second)
    mark(third, "kernel upgrade")
    fault = time.time()
    assert run.recovers(2, fault) < 60
    assert run.supervision()["active"] == ["lwt1", "lwt2"]
    assert events(run, "node_left") == ["lwt3: drained: kernel upgrade; going on on lwt1, lwt2"]
    assert not third.processes_of_run(run.folder.path)
    assert run.supervision()["restarts"] == 0, "that was no fault"

    mark(first, "kernel upgrade")
    output, errors = run.process.communicate(timeout=60 * busy())
    assert run.process.returncode == 75, errors
    assert "1 node(s) are left, 2 are needed" in errors
    assert "lwt1 is left (drained: kernel upgrade)" in errors
    assert "lwt3 is left (drained: kernel upgrade)" in errors
    assert "fab resume" in errors
    assert "Traceback" not in output + errors
    assert "lwt2: drained: it is drained: kernel upgrade; lwt3 steps in" in output
    assert run.folder.read_state().phase == "stopped"
    saved = max(int(path.name.removeprefix("step-")) for path in run.folder.checkpoints.glob("step-*"))
    assert saved == run.folder.read_state().step, "it saved before it left"


def test_spot_notice_on_one_node_leaves_that_node_out(call: Call, cluster: Cluster, long_run: Start) -> None:
    python = sys.executable
    settings = ("--set", "checkpoint.watch_spot=true", "--set", "checkpoint.metadata_url=http://127.0.0.1:8169")
    with metadata_service(cluster.hosts[1], python):
        run = long_run("spot", "--nodes", "lwt1,lwt2", "--min-nodes", "1", *settings)
        run.reaches(3)
        (cluster.hosts[1].root / "root/notice").write_text('{"action": "terminate", "time": "2030-01-01T00:00:00Z"}')
        assert run.recovers(2, time.time()) < 60
        assert run.supervision()["active"] == ["lwt1"]
        assert "lwt2: spot terminate at 2030-01-01T00:00:00Z" in events(run, "node_left")[0]
        assert any(event.kind == "resume" for event in run.folder.read_events())
        stopped = call("stop", "--dir", str(run.runs), "--run", "spot")
    assert stopped.returncode == 0, stopped.stderr


def test_a_node_that_shuts_down_is_left(call: Call, cluster: Cluster, long_run: Start) -> None:
    run = long_run("shutdown", "--nodes", "lwt1,lwt2", "--spares", "lwt3", "--restarts", "0")
    run.reaches(3)
    fault = time.time()
    cluster.hosts[1].ssh("systemctl poweroff", check=False)
    assert run.recovers(2, fault) < 60
    assert run.supervision()["active"] == ["lwt1", "lwt3"]
    assert "lwt2: its processes were asked to end (is it shutting down?)" in events(run, "node_left")[0]
    stopped = call("stop", "--dir", str(run.runs), "--run", "shutdown")
    assert stopped.returncode == 0, stopped.stderr
    cluster.hosts[1].kill()  # boots again after the test
