"""Faults of a run under mpirun: the first cause has a name, nothing is left, and it starts again within its budget."""

from __future__ import annotations

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


def resumed(run: LongRun) -> list[int]:
    return [event.step for event in run.folder.read_events() if event.kind == "resume"]
