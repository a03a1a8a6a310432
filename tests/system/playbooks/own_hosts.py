"""Three bare hosts for the tests of single roles, apart from those that become a whole site."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.system.hosts.cluster import running
from tests.system.hosts.needs import needs_root_and
from tests.system.playbooks.ansible import Ansible, Outcome
from tests.system.playbooks.bare import BareCluster
from tests.system.playbooks.conftest import TOOLS
from tests.system.playbooks.mirror import bare_tree, mirror

# Names and networks: the two halves of the tests (Makefile) run at once, and each takes one.
PLACES = (("lwr", "10.84.0"), ("lwo", "10.83.0"))
Play = Callable[..., Outcome]


@contextlib.contextmanager
def free_place() -> Iterator[tuple[str, str]]:
    """Inside the block a name and a network belong to this process."""
    for name, network in PLACES:
        with Path(f"/run/lock/loopworks-{name}").open("w") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield name, network
            return
    pytest.fail(f"other tests use {' and '.join(name for name, _ in PLACES)}; wait for them")


@pytest.fixture(scope="session")
def own() -> Iterator[BareCluster]:
    """A head and two nodes."""
    needs_root_and(TOOLS)
    state = Path("/var/tmp") / f"loopworks-roles-{os.getpid()}"
    with free_place() as (name, network), running(_cluster(state, name, network)) as hosts:
        names = "".join(f"{host.address} {host.name}\n" for host in hosts.hosts)
        prepare = f"printf '{names}' >> /etc/hosts; apt-get -qq update"  # what role base would lay down
        with ThreadPoolExecutor(len(hosts.hosts)) as pool:
            list(pool.map(lambda host: host.ssh(prepare, timeout_s=120), hosts.hosts))
        yield hosts


def _cluster(state: Path, name: str, network: str) -> BareCluster:
    return BareCluster(state, bare_tree(), 3, name=name, network=network, mirrors=[mirror()], read_only=[], shared=[])


@pytest.fixture(scope="session")
def play(own: BareCluster, tmp_path_factory: pytest.TempPathFactory) -> Play:
    """Runs a playbook on them, with variables."""
    head, *nodes = own.hosts
    variables = {"loopworks_cluster": "ci", "loopworks_cluster_cidr": f"{own.network}.0/24"}
    inventory = own.inventory({"head": [head], "gpu_nodes": nodes}, variables)
    ansible = Ansible(tmp_path_factory.mktemp("own"), inventory)

    def run(playbook: str, *arguments: str, **extra: object) -> Outcome:
        return ansible.play(playbook, *arguments, "-e", json.dumps(extra), timeout_s=400)

    return run
