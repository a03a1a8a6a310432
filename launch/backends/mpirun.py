"""Backend `mpirun`: Open MPI starts all ranks; the same module runs, with the variables that torch expects.

    fab train --backend mpirun --nodes node[1-4] --env NCCL_DEBUG=INFO
    mpirun -np 64 -H node1:16,... -x NCCL_DEBUG ... python -m launch.mpi_rank      is what that becomes

Runs in the foreground. After a fault all ranks end, and the run starts again on the same nodes from its newest
checkpoint; who needs spares, leases and a supervisor takes the ssh backend.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launch.backends.base import LaunchSpec
from launch.backends.local import LocalRun, rank_environment
from launch.plan import RunPlan

LOG = "mpirun.log"
_DEATH = re.compile(r"process rank (\d+) with PID \d+ on node (\S+) exited on signal (\d+)(?: \(([^)]+)\))?")


@dataclass(frozen=True)
class MpirunBackend:
    """Runs all ranks under one mpirun, which is started on this machine.

    `hosts` are the names by which ssh reaches the nodes, as mpirun calls ssh; empty for this machine alone.
    """

    python: str
    hosts: tuple[str, ...] = ()
    ssh_config: str | None = None
    master: tuple[str, int] = ("127.0.0.1", 29500)
    interface: str = "lo"
    cpu_count: int = 1
    extra: Mapping[str, str] = field(default_factory=dict)
    name = "mpirun"

    def specs(self, plan: RunPlan, run_dir: str, checkout: str, console: bool) -> Sequence[LaunchSpec]:
        """Returns the one command and its environment."""
        env = rank_environment(plan, run_dir, checkout, console, self.cpu_count)
        env |= {"MASTER_ADDR": self.master[0], "MASTER_PORT": str(self.master[1])}
        variable = "GLOO_SOCKET_IFNAME" if plan.device == "cpu" else "NCCL_SOCKET_IFNAME"
        env |= {variable: self.interface} if self.interface else {}
        env |= dict(self.extra)
        argv = mpirun_command(self.python, plan, self.hosts, sorted(env), checkout, self.ssh_config)
        return [LaunchSpec("this machine", argv, env, ".")]

    def start(self, specs: Sequence[LaunchSpec]) -> LocalRun:
        """Starts mpirun; rank 0 draws its progress on the output it inherits, what mpirun says goes to a file."""
        (spec,) = specs
        run_dir = spec.env["LOOPWORKS_RUN"]
        with (Path(run_dir) / "logs" / LOG).open("ab") as log:
            process = subprocess.Popen(
                spec.argv,
                env={**os.environ, **spec.env, **root_may_run()},
                stdin=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        return LocalRun(process, run_dir)


def mpirun_command(
    python: str,
    plan: RunPlan,
    hosts: Sequence[str],
    variables: Sequence[str],
    checkout: str,
    ssh_config: str | None,
) -> tuple[str, ...]:
    """Returns the command. Variables go by name: mpirun takes their values from its own environment."""
    places = hosts or ("localhost",)
    slots = ",".join(f"{host}:{node.ranks}" for host, node in zip(places, plan.nodes, strict=True))
    arguments = ["mpirun", "-np", str(plan.world_size), "-H", slots, "--map-by", "slot", "--bind-to", "none"]
    if ssh_config:
        arguments += ["--mca", "plm_rsh_args", f"-F {ssh_config} -o BatchMode=yes"]
    for name in variables:
        arguments += ["-x", name]
    return (*arguments, "--wdir", checkout, python, "-m", "launch.mpi_rank")


def death_seen(log: str) -> str:
    """Returns which rank mpirun saw dying by a signal, in its newest start; empty when it says nothing of the kind."""
    found = list(_DEATH.finditer(log))
    if not found:
        return ""
    rank, node, number, name = found[-1].groups()
    return f"rank {rank} on {node} was ended by signal {number} ({name or 'killed from outside?'})"


def root_may_run() -> dict[str, str]:
    """Open MPI refuses root unless told twice; the ranks of every other backend run as root too when fab does."""
    return {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
