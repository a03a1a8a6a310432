"""A run under mpirun after faults: the first cause has a name, nothing is left, it starts again within its budget, and
`fab resume` goes on with it on the same nodes."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.system.hosts.cluster import Cluster
from tests.system.hosts.conftest import LongRun, busy, rank_on, wait_for

pytestmark = pytest.mark.system


def test_killed_rank_under_mpirun(cluster: Cluster, long_run: Callable[..., LongRun]) -> None:
    run = long_run("mpikill", "--nodes", "lwt1,lwt2", "--backend", "mpirun", "--restarts", "1")
    run.reaches(4)
    rank_on(cluster.hosts[1], run.folder).kill()
    wait_for(lambda: bool(resumed(run)), "a start from the checkpoint", 60 * busy(), run.diagnosis)
    before = run.step()
    run.reaches(before + 2)
    (restart,) = [event.message for event in run.folder.read_events() if event.kind == "restart"]
    assert restart == "rank 1 on lwt2 was ended by signal 9 (Killed); restart 1 of 1"

    rank_on(cluster.hosts[1], run.folder).kill()
    output, errors = run.process.communicate(timeout=60 * busy())
    assert run.process.returncode == 1
    assert "error: rank 1 on lwt2 was ended by signal 9 (Killed)" in errors
    assert "Traceback" not in output + errors
    assert run.folder.read_state().phase == "failed"
    assert not any(host.processes_of_run(run.folder.path) for host in cluster.hosts)

    again = run.call("resume", "--dir", str(run.runs), "--run", "mpikill", "--json")
    wait_for(lambda: len(resumed(run)) == 2, "a start by fab resume", 60 * busy(), run.diagnosis)
    assert rank_on(cluster.hosts[1], run.folder).environ()["OMPI_COMM_WORLD_SIZE"] == "2"
    again.send_signal(signal.SIGINT)
    output, errors = again.communicate(timeout=60 * busy())
    assert again.returncode == 130, errors
    assert "go on with it by: fab train --resume mpikill" in errors
    assert not any(host.processes_of_run(run.folder.path) for host in cluster.hosts)


def resumed(run: LongRun) -> list[int]:
    return [event.step for event in run.folder.read_events() if event.kind == "resume"]
