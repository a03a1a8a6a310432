"""A node's own disk, where code, logs and state of a run lie, is full: before the start, and during the run."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.system.hosts.cluster import Cluster, Host
from tests.system.hosts.conftest import LongRun, busy, wait_for

pytestmark = pytest.mark.system
Call = Callable[..., "subprocess.CompletedProcess[str]"]
SIZE_MIB = 40
FILL = "cat /dev/zero >/root/.loopworks/ballast"


@pytest.fixture
def small_own_disk(cluster: Cluster) -> Iterator[Host]:
    """The second host, whose ~/.loopworks is a file system of its own that is soon full."""
    host = cluster.hosts[1]
    host.ssh(f"mkdir -p /root/.loopworks && mount -t tmpfs -o size={SIZE_MIB}m own /root/.loopworks")
    yield host
    with contextlib.suppress(subprocess.CalledProcessError):
        host.ssh("umount -l /root/.loopworks")


def test_full_before_the_start(call: Call, small_own_disk: Host, shared: Path, shared_config: Path) -> None:
    small_own_disk.ssh(FILL, check=False)
    outcome = call("train", "--nodes", "lwt1,lwt2", "--config", str(shared_config), "--name", "refused")
    assert outcome.returncode == 3, outcome.stderr
    assert "lwt2: node folder: 0 MiB are free for ~/.loopworks" in outcome.stderr
    assert "next: lwt2: free 32 MiB there" in outcome.stderr
    assert not (shared / "runs" / "refused").exists()


def test_full_during_the_run_does_no_harm(
    call: Call, small_own_disk: Host, cluster: Cluster, long_run: Callable[..., LongRun]
) -> None:
    run = long_run("owndisk", "--nodes", "lwt1,lwt2", "--hang-timeout", "4")
    run.reaches(3)
    small_own_disk.ssh(FILL, check=False)
    assert small_own_disk.ssh("df --output=avail /root/.loopworks | tail -1").stdout.strip() == "0"
    before = run.step()
    # Longer than a rank may be silent: its heartbeats go on.
    wait_for(lambda: heartbeats_go_on(small_own_disk, run), "heartbeats on the full disk", 20 * busy(), run.diagnosis)
    run.reaches(before + 20)
    assert run.supervision()["attempt"] == 1
    stopped = call("stop", "--dir", str(run.runs), "--run", "owndisk")
    assert stopped.returncode == 0, stopped.stderr
    assert run.process.wait(30 * busy()) == 130
    assert run.folder.read_state().phase == "stopped", "it saved and left by itself"
    assert not any(host.processes_of_run(run.folder.path) for host in cluster.hosts)


def heartbeats_go_on(host: Host, run: LongRun) -> bool:
    path = f"/root/.loopworks/runs/{run.folder.name}/attempt-1/heartbeats/rank-1.json"
    first = host.ssh(f"cat {path}; sleep 6; echo; cat {path}").stdout.split("\n")
    return first[0].strip() != first[-1].strip()


def test_full_between_preflight_and_start_ends_at_once(
    call: Call, small_own_disk: Host, shared: Path, shared_config: Path
) -> None:
    """As when something else fills the disk: the checkout cannot be written. Another start would end the same way."""
    small_own_disk.ssh("mkdir -p /root/.loopworks/code && mount -t tmpfs -o size=8k code /root/.loopworks/code")
    try:
        outcome = call("train", "--nodes", "lwt1,lwt2", "--config", str(shared_config), "--name", "nocode")
    finally:
        small_own_disk.ssh("umount -l /root/.loopworks/code")
    assert outcome.returncode == 2, outcome.stderr + outcome.stdout
    assert "lwt2: cannot write ~/.loopworks/code" in outcome.stderr
    assert "its disk is full" in outcome.stderr
    assert "next: free space for ~/.loopworks there" in outcome.stderr
