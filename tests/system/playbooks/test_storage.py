"""Shared storage where nothing can be mounted: folders are made, the rest is said. Mounts are tested in tests/vm."""

from __future__ import annotations

import pytest

from tests.system.playbooks.bare import BareCluster
from tests.system.playbooks.own_hosts import Play

pytest_plugins = ("tests.system.playbooks.own_hosts",)
pytestmark = pytest.mark.system


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


@pytest.mark.parametrize("kind", ["nfs", "fsx-lustre"])
def test_a_container_mounts_nothing_and_says_so(play: Play, kind: str) -> None:  # noqa: F811
    storage = {"kind": kind, "source": "10.0.0.1:/x", "mount_point": "/other"}
    outcome = play("storage.yml", "-v", loopworks_storage=storage, storage_scratch="/scratch")
    assert (outcome.returncode, outcome.changed()) == (0, 0), outcome.output
    assert f"storage: /other: a container cannot mount {kind}" in outcome.output
    assert "storage: /scratch: a container has no disks of its own" in outcome.output


def test_a_mount_point_that_cannot_be_is_refused(play: Play) -> None:  # noqa: F811
    outcome = play("storage.yml", loopworks_storage={"kind": "none", "mount_point": "shared"})
    assert outcome.returncode != 0
    assert "'shared' cannot be a mount point. Take an absolute path" in outcome.output
