"""Three bare hosts for the tests of single roles, apart from those that become a whole site."""

from __future__ import annotations

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

NAME, NETWORK = "lwr", "10.84.0"
Play = Callable[..., Outcome]


@pytest.fixture(scope="session")
def own() -> Iterator[BareCluster]:
    """lwr1 (head), lwr2 and lwr3 (nodes)."""
    needs_root_and(TOOLS)
    state = Path("/var/tmp") / f"loopworks-roles-{os.getpid()}"
    made = BareCluster(state, bare_tree(), 3, name=NAME, network=NETWORK, mirrors=[mirror()], read_only=[], shared=[])
    with running(made) as hosts:
        names = "".join(f"{host.address} {host.name}\n" for host in hosts.hosts)
        prepare = f"printf '{names}' >> /etc/hosts; apt-get -qq update"  # what role base would lay down
        with ThreadPoolExecutor(len(hosts.hosts)) as pool:
            list(pool.map(lambda host: host.ssh(prepare), hosts.hosts))
        yield hosts


@pytest.fixture(scope="session")
def play(own: BareCluster, tmp_path_factory: pytest.TempPathFactory) -> Play:
    """Runs a playbook on them, with variables."""
    head, *nodes = own.hosts
    variables = {"loopworks_cluster": "ci", "loopworks_cluster_cidr": f"{NETWORK}.0/24"}
    inventory = own.inventory({"head": [head], "gpu_nodes": nodes}, variables)
    ansible = Ansible(tmp_path_factory.mktemp("own"), inventory)

    def run(playbook: str, *arguments: str, **extra: object) -> Outcome:
        return ansible.play(playbook, *arguments, "-e", json.dumps(extra), timeout_s=400)

    return run
