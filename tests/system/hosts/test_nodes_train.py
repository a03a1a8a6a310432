"""`fab train --nodes` without faults: the same losses, everything in place, nothing left."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.launch_nodes import bare_first_step_s
from tests.system.conftest import CHECKOUT, fab_command
from tests.system.hosts.cluster import Cluster
from tests.system.hosts.conftest import LongRun, busy, rank_on, wait_for
from training.records import RunFolder

pytestmark = pytest.mark.system
Call = Callable[..., "subprocess.CompletedProcess[str]"]

SHORT = 'a; "$(id)" \'b'
# What fab adds to the time to the first step on two hosts; the checkout is sent in it.
OVERHEAD_S = 5.0
ODD = "a b'c\"; touch /tmp/loopworks-was-here; $(id) `id` \\ *"


def losses(folder: Path) -> list[float | None]:
    return [record.loss for record in RunFolder(folder).read_metrics()]


def test_two_hosts_train_to_the_losses_of_one_over_ssh_and_mpirun(
    call: Call, cluster: Cluster, shared: Path, shared_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = ("--nodes", f"{cluster.name}[1-2]", "--config", str(shared_config))
    before = cluster.hosts[0].ssh("find ~/.loopworks", check=False).stdout
    planned = call("train", *nodes, "--dry-run", "--json")
    assert planned.returncode == 0, planned.stderr
    commands = json.loads(planned.stdout)["commands"]
    assert [command["node"] for command in commands] == ["lwt1", "lwt2"]
    assert all("--nnodes=2" in command["argv"] for command in commands)
    assert {command["env"]["GLOO_SOCKET_IFNAME"] for command in commands} == {"eth0"}
    after = cluster.hosts[0].ssh("find ~/.loopworks", check=False).stdout
    assert after == before, "a dry run leaves no trace"

    began = time.time()
    outcome = call("train", *nodes, "--name", "two", "--json", "--set", f"evaluation.prompt={SHORT}")
    assert outcome.returncode == 0, outcome.stderr
    result = json.loads(outcome.stdout)
    assert result["steps"] == 6
    assert result["sample"].startswith(SHORT)

    # The same by hand: torchrun over plain ssh, with the run folder and the environment that fab makes.
    monkeypatch.setenv("LOOPWORKS_SSH_CONFIG", str(cluster.ssh_config))
    bare = bare_first_step_s(str(shared_config), f"{cluster.name}[1-2]", "bare", str(cluster.ssh_config))
    overhead = RunFolder(shared / "runs" / "two").read_metrics()[0].time - began - bare
    assert overhead < OVERHEAD_S * busy(), "facts, checks, sending and starting"
    assert losses(shared / "runs" / "bare") == pytest.approx(losses(shared / "runs" / "two"), abs=1e-4)

    here = ("--set", "distributed.ranks_per_node=2")
    one = subprocess.run(
        fab_command("train", "--config", str(shared_config), "--name", "one", "--json", *here),
        cwd=CHECKOUT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert one.returncode == 0, one.stderr
    assert losses(shared / "runs" / "two") == pytest.approx(losses(shared / "runs" / "one"), abs=1e-4)
    assert len(losses(shared / "runs" / "two")) == 6
    for host in cluster.hosts[:2]:
        assert not host.processes_of_run(shared / "runs" / "two")

    # Open MPI starts the same module; values go by its environment, not by its command line.
    mpi = call("train", *nodes, "--name", "mpi", "--json", "--backend", "mpirun", "--env", f"ODD={ODD}")
    assert mpi.returncode == 0, mpi.stderr + (shared / "runs/mpi/logs/mpirun.log").read_text()
    assert losses(shared / "runs" / "mpi") == pytest.approx(losses(shared / "runs" / "one"), abs=1e-4)


def test_odd_values_reach_the_ranks_and_stop_leaves_nothing(
    call: Call, cluster: Cluster, shared: Path, long_run: Callable[..., LongRun]
) -> None:
    codes = cluster.hosts[0].ssh("ls -d ~/.loopworks/code/*").stdout
    run = long_run("odd", "--nodes", "lwt1,lwt2", "--env", f"ODD={ODD}")
    run.reaches(2)
    for host in cluster.hosts[:2]:
        assert rank_on(host, run.folder).environ()["ODD"] == ODD
        assert host.ssh("test -e /tmp/loopworks-was-here", check=False).returncode == 1
    assert cluster.hosts[0].ssh("ls -d ~/.loopworks/code/*").stdout == codes, "what is there is not sent again"
    assert "Traceback" not in run.diagnosis()
    stopped = call("stop", "--dir", str(run.runs), "--run", "odd")
    assert stopped.returncode == 0, stopped.stderr
    assert "nothing of it is left on lwt1, lwt2" in stopped.stdout
    _, errors = run.process.communicate(timeout=30 * busy())
    assert run.process.returncode == 130
    assert "fab resume" in errors
    assert run.folder.read_state().phase == "stopped"
    assert list(run.folder.checkpoints.glob("step-*"))

    planned = call("plan", "--resume", "odd", "--set", f"run.dir={run.runs}", "--json")
    assert planned.returncode == 0, planned.stderr
    found = json.loads(planned.stdout)
    assert [command["node"] for command in found["commands"]] == ["lwt1", "lwt2"]
    assert found["expected"]["resume"]["step"] == run.folder.read_state().step
    assert found["expected"]["resume"]["state"] == "verified"
    assert found["expected"]["step_time"]["seconds"] > 0, "measured in the run itself"

    before = run.step()
    again = run.call("resume", "--dir", str(run.runs), "--run", "odd")
    wait_for(lambda: run.step() > before + 1, "a step after the resume", 60 * busy(), run.diagnosis)
    assert rank_on(cluster.hosts[1], run.folder).environ()["ODD"] == ODD, "it goes on as it was started"
    stopped = call("stop", "--dir", str(run.runs), "--run", "odd")
    assert stopped.returncode == 0, stopped.stderr
    _, errors = again.communicate(timeout=30 * busy())
    assert again.returncode == 130, errors
    assert "torchrun" in call("logs", "--dir", str(run.runs), "--node", "lwt2").stdout


def test_a_mixture_is_read_on_all_nodes(
    call: Call, cluster: Cluster, shared: Path, shared_config: Path, tiny_dataset: Path
) -> None:
    """Each of its datasets must be there on every node; the plan knows how much there is of all of them."""
    here_only = json.dumps({str(shared / "tiny"): 1.0, str(tiny_dataset): 0.5})
    arguments = ("--nodes", "lwt1,lwt2", "--config", str(shared_config), "--name", "mixed", "--json")
    refused = call("train", *arguments, "--set", f"data.mixture={here_only}")
    assert refused.returncode == 3, refused.stderr
    assert f"lwt2: data.path: {tiny_dataset} is not there" in refused.stderr
    shutil.copytree(shared / "tiny", shared / "more")
    both = json.dumps({str(shared / "tiny"): 1.0, str(shared / "more"): 0.5})
    outcome = call("train", *arguments, "--set", f"data.mixture={both}", "--set", "training.max_steps=2")
    assert outcome.returncode == 0, outcome.stderr
    assert json.loads(outcome.stdout)["steps"] == 2
