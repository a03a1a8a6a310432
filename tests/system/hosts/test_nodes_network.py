"""How ranks meet on nodes: by tcp:// at an address of its own; when the way to the meeting port breaks in mid-run."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.hosts.cluster import Cluster
from tests.system.hosts.conftest import LongRun, busy, rank_on
from training.records import RunFolder

pytestmark = pytest.mark.system
Call = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.parametrize("port", [29777, 29600])
def test_init_method_tcp(call: Call, cluster: Cluster, shared: Path, shared_config: Path, port: int) -> None:
    """At a port of its own, and at the one where torchrun meets too."""
    meeting = f"distributed.init_method=tcp://{cluster.hosts[0].address}:{port}"
    arguments = ("--nodes", "lwt1,lwt2", "--config", str(shared_config), "--name", f"tcp{port}", "--port", "29600")
    outcome = call("train", *arguments, "--json", "--set", meeting, "--set", "training.max_steps=2")
    assert outcome.returncode == 0, outcome.stderr
    assert json.loads(outcome.stdout)["steps"] == 2
    assert "2 ranks" in next(
        e.message for e in RunFolder(shared / f"runs/tcp{port}").read_events() if e.kind == "start"
    )


def test_meeting_port_that_breaks_in_mid_run(cluster: Cluster, long_run: Callable[..., LongRun]) -> None:
    """Packets from one node to that port are lost from some moment on: the run goes on, and ends well."""
    run = long_run("port", "--nodes", "lwt1,lwt2", "--set", "training.max_steps=40")
    run.reaches(3)
    port = rank_on(cluster.hosts[1], run.folder).environ()["MASTER_PORT"]
    block = f"ip rule add ipproto tcp dport {port} blackhole"
    cluster.hosts[1].ssh(block)
    try:
        began = time.time()
        _, errors = run.process.communicate(timeout=90 * busy())
    finally:
        cluster.hosts[1].ssh(block.replace("add", "del"))
    assert run.process.returncode == 0, errors + run.diagnosis()
    assert time.time() - began < 60 * busy(), run.diagnosis()
    assert run.folder.read_state().phase == "finished"
    assert run.supervision()["attempt"] == 1
    assert not any(host.processes_of_run(run.folder.path) for host in cluster.hosts)
