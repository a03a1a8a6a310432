"""`fab train --backend mpirun`: the run that mpirun starts, here or on nodes."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.backends.base import LaunchSpec
from launch.backends.mpirun import MpirunBackend
from launch.cluster import ClusterRequest, PreparedCluster, prepare_again
from launch.errors import UsageError
from launch.node_facts import free_ports
from launch.nodes import Node
from launch.probe import meeting, remotes
from launch.remote import CHECKOUT, checkout_files, ensure, pack
from launch.request import PreparedRun, TrainRequest, prepare_run
from launch.ssh import HostError, on_all
from launch.supervision import MPIRUN_FILE, MpirunSettings, write
from training.records import RunFolder


@dataclass(frozen=True)
class PreparedMpirun(PreparedRun):
    """A run under mpirun that is decided but not started; `cluster` is None on this machine alone."""

    cluster: PreparedCluster | None = None
    settings: MpirunSettings = field(kw_only=True)

    def plan_file(self) -> dict[str, Any]:
        """Returns what plan.json holds."""
        own = super().plan_file()
        return own if self.cluster is None else {**own, "dataset_dir": self.cluster.plan_file()["dataset_dir"]}

    def specs(self, run_dir: str, console: bool) -> list[LaunchSpec]:
        """Returns the one command."""
        checkout = str(CHECKOUT) if self.cluster is None else self.cluster.code_folder()
        return list(self.backend.specs(self.plan, run_dir, checkout, console))

    def remember(self, run: RunFolder) -> None:
        """Writes mpirun.json."""
        super().remember(run)
        write(run.path / MPIRUN_FILE, self.settings)


def under_mpirun(prepared: PreparedRun, request: ClusterRequest) -> PreparedMpirun:
    """Returns the same run for mpirun. Raises UsageError when mpirun is missing."""
    if shutil.which("mpirun") is None:
        raise UsageError("--backend mpirun: there is no mpirun on this machine", "apt install openmpi-bin")
    common: dict[str, Any] = {"config": prepared.config, "plan": prepared.plan, "dataset_dir": prepared.dataset_dir}
    common |= {"folder": prepared.folder, "resume": prepared.resume, "restarts": request.restarts}
    cluster = prepared.settings if isinstance(prepared, PreparedCluster) else None
    common["settings"] = MpirunSettings(
        cluster=cluster, restarts=request.restarts, port=request.port, env=request.environment()
    )
    if not isinstance(prepared, PreparedCluster):
        port = request.port or free_ports(1)[0]
        local = MpirunBackend(
            sys.executable,
            master=("127.0.0.1", port),
            cpu_count=os.cpu_count() or 1,
            extra=request.environment(),
        )
        return PreparedMpirun(**common, backend=local)
    settings = prepared.settings
    names = [node.name for node in prepared.plan.nodes]
    first = settings.facts[names[0]]
    homes = {settings.facts[name]["home"] for name in names}
    if len(homes) > 1:
        raise UsageError(
            f"--backend mpirun needs the same home folder on all nodes, found {', '.join(sorted(homes))}",
            "use the same user everywhere, or the ssh backend",
        )
    place = meeting(first, settings.port)
    backend = MpirunBackend(
        first["python"],
        hosts=tuple(settings.node(name).host for name in names),
        ssh_config=settings.ssh_config or os.environ.get("LOOPWORKS_SSH_CONFIG"),
        master=(place.address, place.master_port),
        interface=first["interface"],
        cpu_count=first["machine"]["cpu_count"],
        extra=settings.env,
    )
    return PreparedMpirun(**common, backend=backend, cluster=prepared)


def under_mpirun_again(request: TrainRequest, before: MpirunSettings, writes: bool = True) -> PreparedMpirun:
    """The same for a run that goes on, where and as mpirun.json says."""
    cluster = before.cluster
    prepared = prepare_run(request) if cluster is None else prepare_again(request, cluster, writes)
    env = tuple(f"{name}={value}" for name, value in before.env.items())
    again = ClusterRequest(backend="mpirun", restarts=before.restarts, port=before.port, env=env)
    return under_mpirun(prepared, again)


def send_to_all(prepared: PreparedMpirun) -> None:
    """Puts the checkout on all nodes that lack it. Raises HostError."""
    if prepared.cluster is not None:
        send_code(prepared.cluster)


def send_code(prepared: PreparedCluster) -> None:
    """Puts the checkout, and a dataset that is sent, on the nodes that lack them. Raises HostError."""
    settings = prepared.settings
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "code.tar.gz"
        code.write_bytes(pack(CHECKOUT, checkout_files()))
        with remotes([Node(**item) for item in settings.nodes], settings.ssh_config) as hosts:
            answers = on_all(hosts, lambda remote: ensure(remote, settings.sources(code)))
    for answer in answers.values():
        if isinstance(answer, HostError):
            raise answer
