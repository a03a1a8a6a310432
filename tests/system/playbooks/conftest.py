"""Fixtures: three bare hosts (a head and two nodes), what they install from, and Ansible over them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.system.hosts.cluster import running
from tests.system.hosts.needs import needs_root_and
from tests.system.playbooks.ansible import Ansible, Outcome
from tests.system.playbooks.bare import BareCluster, BareHost
from tests.system.playbooks.mirror import bare_tree, mirror
from tests.system.playbooks.wheelhouse import wheels

TOOLS = ("systemd-nspawn", "mmdebstrap", "ip", "ssh-keygen", "dpkg-scanpackages")
NETWORK = "10.88.0"
# On the same wire, and in nobody's list: documentation networks. The first is allowed, the second is the world.
PEOPLE, WORLD = "198.51.100.1", "203.0.113.1"


@pytest.fixture(scope="session")
def wheelhouse() -> Path:
    """Wheels of all that a node's Python needs."""
    return wheels()


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory, wheelhouse: Path) -> Iterator[BareCluster]:
    """lwp1 (head), lwp2 and lwp3 (nodes), which share one folder."""
    needs_root_and(TOOLS)
    shared = tmp_path_factory.mktemp("bare") / "shared"
    shared.mkdir()
    state = Path("/var/tmp") / f"loopworks-bare-{os.getpid()}"
    made = BareCluster(
        state, bare_tree(), 3, name="lwp", network=NETWORK, mirrors=[mirror()], read_only=[wheelhouse], shared=[shared]
    )
    with running(made) as hosts:
        for address in (PEOPLE, WORLD):
            add = ["ip", "addr", "add", f"{address}/32", "dev", hosts.bridge]
            subprocess.run(add, check=True, capture_output=True, timeout=20)
        yield hosts


@pytest.fixture(scope="session")
def site(bare: BareCluster, wheelhouse: Path, tmp_path_factory: pytest.TempPathFactory) -> Ansible:
    """Ansible over the three hosts, with an inventory as a small private cluster would have it."""
    return Ansible(tmp_path_factory.mktemp("site"), site_inventory(bare, wheelhouse))


def site_inventory(bare: BareCluster, wheelhouse: Path) -> str:
    """The inventory of all hosts that there are: the first is the head."""
    head, *nodes = bare.hosts
    variables: dict[str, object] = {
        "loopworks_cluster": "ci",
        "loopworks_cluster_cidr": f"{NETWORK}.0/24",
        "loopworks_allowed_cidrs": [f"{PEOPLE}/32"],
        "loopworks_storage": {"kind": "none", "mount_point": str(bare.shared[0])},
        "ssh_admin_keys": [f"{bare.key}.pub"],
        "python_wheelhouse": str(wheelhouse),
        "python_compile": False,  # saves half a minute a host; the first start pays for what it imports
    }
    return bare.inventory({"head": [head], "gpu_nodes": nodes}, variables)


@dataclass(frozen=True)
class Applied:
    """What the first runs over bare hosts said."""

    blank: Outcome
    before: str
    first: Outcome


def etc(host: BareHost) -> str:
    """Names, sizes and times of everything in /etc, and the accounts."""
    return host.ssh("find /etc -type f -printf '%p %s %T@\\n' | sort; getent passwd").stdout


@pytest.fixture(scope="session")
def applied(site: Ansible, bare: BareCluster) -> Applied:
    """Check mode on blank hosts, then the real thing."""
    node = bare.hosts[1]
    before = etc(node)
    blank = site.play("site.yml", "--check", "--diff")
    after = etc(node)
    first = site.play("site.yml")
    assert first.returncode == 0, first.output[-6000:]
    return Applied(blank, "" if before == after else f"{before}\n---\n{after}", first)
