"""A node more, and a node less, in a cluster that stands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.playbooks.ansible import Ansible
from tests.system.playbooks.bare import BareCluster, BareHost
from tests.system.playbooks.conftest import Applied, site_inventory

pytestmark = pytest.mark.system
BOOT = "cat /proc/sys/kernel/random/boot_id"


@pytest.fixture(scope="module")
def added(bare: BareCluster, applied: Applied) -> Iterator[BareHost]:
    """A fourth host, as bare as the others were."""
    host = BareHost(bare, len(bare.hosts) + 1)
    bare.hosts.append(host)  # the cluster takes it down, whatever happens here
    host.create()
    bare.write_known_hosts()
    with bare.ssh_config.open("a") as file:
        file.write(bare.ssh_section(host))
    host.boot()
    host.wait()
    yield host
    host.remove()
    bare.hosts.remove(host)


@pytest.fixture(scope="module")
def wider(bare: BareCluster, added: BareHost, wheelhouse: Path, tmp_path_factory: pytest.TempPathFactory) -> Ansible:
    """Ansible over all four."""
    return Ansible(tmp_path_factory.mktemp("wider"), site_inventory(bare, wheelhouse))


def test_a_new_node_is_made_ready_and_the_others_hear_of_it(wider: Ansible, bare: BareCluster, added: BareHost) -> None:
    refused = wider.play("add-node.yml", "-e", "new_nodes=lwp9")
    assert refused.returncode != 0
    assert "lwp9 is not in gpu_nodes or storage" in refused.output

    # As a driver or EFA leaves it; there is neither here.
    added.ssh("echo 'nvidia: nouveau is loaded' > /run/loopworks-reboot")
    boots = [host.ssh(BOOT).stdout for host in bare.hosts]
    outcome = wider.play("add-node.yml", "-e", f"new_nodes={added.name}")
    assert outcome.returncode == 0, outcome.output[-5000:]
    rebooted = [host.name for host, boot in zip(bare.hosts, boots, strict=True) if host.ssh(BOOT).stdout != boot]
    assert rebooted == [added.name], "what was due, and nothing of the others"
    head, neighbour = bare.hosts[0], bare.hosts[1]
    login = head.ssh(f"su - loopworks -c 'ssh -o BatchMode=yes {added.name} hostname'")
    assert login.stdout.strip() == added.name
    assert added.name in neighbour.ssh("cat /etc/ssh/ssh_known_hosts").stdout
    assert added.name in head.ssh("cat /etc/prometheus/targets/node/*.json").stdout
    assert added.ssh("systemctl is-active loopworks-firewall").stdout.strip() == "active"


def test_a_node_is_given_back_as_it_came_and_its_data_stays(wider: Ansible, bare: BareCluster, added: BareHost) -> None:
    refused = wider.play("teardown.yml", "--limit", added.name, "-e", "teardown_confirm=another")
    assert refused.returncode != 0
    assert "is of the cluster ci" in refused.output

    outcome = wider.play("teardown.yml", "--limit", added.name, "-e", "teardown_confirm=ci")
    assert outcome.returncode == 0, outcome.output[-5000:]
    assert added.ssh("find /etc /opt -name '*loopworks*'").stdout.strip() == ""
    assert "loopworks" not in added.ssh("cat /etc/hosts; nft list tables").stdout
    assert added.ssh("systemctl is-active prometheus-node-exporter", check=False).stdout.strip() != "active"
    assert added.ssh("systemctl --failed --no-legend --plain").stdout.strip() == ""
    assert (bare.shared[0] / "runs").is_dir(), "shared data stays"
    assert bare.hosts[1].ssh("systemctl is-active loopworks-firewall").stdout.strip() == "active"
