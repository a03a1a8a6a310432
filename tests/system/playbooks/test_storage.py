"""Shared storage where nothing can be mounted: folders are made, the rest is said. Lustre up to its mount command.

NFS and local disks are really mounted in tests/vm.
"""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.hosts.cluster import Host
from tests.system.playbooks import lustre_standin
from tests.system.playbooks.bare import BareCluster
from tests.system.playbooks.own_hosts import Play

pytest_plugins = ("tests.system.playbooks.own_hosts",)
pytestmark = pytest.mark.system
FSX = "/opt/fsx"


def on(host: Host, value: str, otherwise: str) -> str:
    """A variable that has one value on one host."""
    return f"{{{{ '{value}' if inventory_hostname == '{host.name}' else '{otherwise}' }}}}"


def test_a_folder_that_is_there_is_taken(own: BareCluster, play: Play) -> None:  # noqa: F811
    storage = {"kind": "none", "mount_point": "/shared"}
    check = play("storage.yml", "--check", "--diff", loopworks_storage=storage)
    assert check.returncode == 0, check.output
    applied = play("storage.yml", loopworks_storage=storage)
    assert applied.returncode == 0, applied.output
    for host in own.hosts:
        assert host.ssh("stat -c %u:%g /shared/runs /shared/datasets").stdout.split() == ["2600:2600"] * 2
    again = play("storage.yml", loopworks_storage=storage)
    assert (again.returncode, again.changed()) == (0, 0), again.changes()


def test_a_container_mounts_nothing_and_says_so(own: BareCluster, play: Play) -> None:  # noqa: F811
    kind = on(own.hosts[0], "nfs", "fsx-lustre")
    storage = {"kind": kind, "source": "10.0.0.1:/x", "mount_point": "/other"}
    outcome = play("storage.yml", "-v", loopworks_storage=storage, storage_scratch="/scratch")
    assert (outcome.returncode, outcome.changed()) == (0, 0), outcome.output
    for said in ("nfs", "fsx-lustre"):
        assert f"storage: /other: a container cannot mount {said}" in outcome.output
    assert "storage: /scratch: a container has no disks of its own" in outcome.output


def test_a_mount_point_that_cannot_be_is_refused(own: BareCluster, play: Play) -> None:  # noqa: F811
    only = ("--limit", f"{own.hosts[0].name},localhost")
    outcome = play("storage.yml", *only, loopworks_storage={"kind": "none", "mount_point": "shared"})
    assert outcome.returncode != 0
    assert "'shared' cannot be a mount point. Take an absolute path" in outcome.output


@pytest.fixture
def machines(own: BareCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareCluster]:  # noqa: F811
    """The hosts as machines that see AWS's repository of the Lustre client."""
    folder = tmp_path_factory.mktemp("fsx") / "repository"
    lustre_standin.repository(folder)
    for host in own.hosts:
        shutil.copytree(folder, host.root / FSX.lstrip("/"))
        host.ssh("mv /run/systemd/container /run/systemd/container.away")
    yield own
    for host in own.hosts:
        host.ssh("systemctl stop fsx.mount; mv /run/systemd/container.away /run/systemd/container", check=False)


def test_the_lustre_client_up_to_its_mount_command(machines: BareCluster, play: Play) -> None:  # noqa: F811
    """One host has a client for its kernel, one has none, and one is given a list that another key has signed."""
    served, elsewhere, deceived = machines.hosts
    settings: dict[str, Any] = {
        "loopworks_provider": "aws",
        "loopworks_storage": {"kind": "fsx-lustre", "source": "fs-1.fsx.example@tcp:/abc", "mount_point": "/fsx"},
        "storage_automount": False,  # which a container does not have
        "storage_lustre_repository": f"file:{FSX}",
        "storage_lustre_suite": on(elsewhere, "elsewhere", "here"),
        "storage_lustre_key": f"file://{FSX}/{on(served, 'key', 'elsewhere')}.asc",
    }
    kernel = platform.release()
    check = play("storage.yml", "--check", "--diff", "--limit", f"{served.name},localhost", **settings)
    assert check.returncode == 0, check.output
    assert "Type=lustre" in check.output, "what comes after the installation is shown, too"
    done = play("storage.yml", "-v", **settings)
    text = re.sub(r"\s+", " ", done.output)
    assert [done.hosts[host.name][3] for host in machines.hosts] == [0, 0, 1], done.output

    assert f"storage_lustre_repository: file:{FSX} here cannot be used, and nothing was installed from it" in text
    assert deceived.ssh("ls /etc/apt/sources.list.d /etc/apt/keyrings | grep lustre", check=False).stdout == ""
    deceived.ssh("apt-get update && ! dpkg-query -s lustre-client-utils")

    newest = ", ".join(sorted(lustre_standin.AWS_KERNELS, reverse=True))
    assert f"storage: /fsx: no Lustre client for kernel {kernel}, file:{FSX} elsewhere has {newest}" in text
    elsewhere.ssh("ls /etc/apt/sources.list.d/fsx-lustre.sources && ! ls /etc/systemd/system/fsx.mount")

    assert served.ssh("apt-mark showhold").stdout.split() == [f"lustre-client-modules-{kernel}", "lustre-client-utils"]
    unit = served.ssh("cat /etc/systemd/system/fsx.mount").stdout.splitlines()
    assert {"What=fs-1.fsx.example@tcp:/abc", "Type=lustre", "Options=_netdev,noatime,flock"} <= set(unit)
    call = served.ssh(f"cat {lustre_standin.NOTES}").stdout.split()
    assert call[:3] == ["fs-1.fsx.example@tcp:/abc", "/fsx", "-o"] and {"noatime", "flock"} <= set(call[3].split(","))
    assert served.ssh("systemctl is-active fsx.mount; stat -c %u /fsx/runs").stdout.split() == ["active", "2600"]

    again = play("storage.yml", "--limit", f"{served.name},{elsewhere.name},localhost", **settings)
    assert (again.returncode, again.changed()) == (0, 0), again.changes()
