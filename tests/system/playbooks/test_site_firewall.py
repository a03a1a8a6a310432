"""The packet filter on a real host: it refuses what would lock us out, and takes back rules that do. About 50 s."""

from __future__ import annotations

import json

import pytest

from tests.system.playbooks.ansible import Ansible
from tests.system.playbooks.bare import BareCluster

pytestmark = pytest.mark.system

# Valid, and in force before our own rules: nobody can log in any more.
SHUT = "}\nchain shut {\ntype filter hook input priority -10;\ntcp dport 22 ct state new drop\naccept"


def ruleset(bare: BareCluster) -> str:
    return bare.hosts[2].ssh("nft --stateless list table inet loopworks").stdout


@pytest.fixture(scope="module")
def before(site: Ansible, bare: BareCluster) -> str:
    """The rules of the third host, in force whether or not the whole site was applied before."""
    outcome = site.play("base.yml", "firewall.yml", "--limit", bare.hosts[2].name)
    assert outcome.returncode == 0, outcome.output[-3000:]
    return ruleset(bare)


def test_rules_that_shut_us_out_are_refused_or_taken_back(site: Ansible, bare: BareCluster, before: str) -> None:
    name = bare.hosts[2].name
    outside = site.play("firewall.yml", "--limit", name, "-e", "loopworks_cluster_cidr=192.0.2.0/24")
    assert outside.returncode != 0
    assert f"{name}: this connection comes from {bare.network}.1" in outside.output
    assert "Add its network to loopworks_allowed_cidrs" in outside.output
    assert outside.changed() == 0
    assert ruleset(bare) == before

    wish = {"firewall_rollback_s": 10, "firewall_extra_rules": [SHUT]}
    tried = site.play("firewall.yml", "--limit", name, "-e", json.dumps(wish))
    assert tried.returncode != 0
    assert "the new rules did not stand their trial" in tried.output
    assert ruleset(bare) == before
    assert "chain shut" not in bare.hosts[2].ssh("cat /etc/loopworks/firewall.nft").stdout, "nor at the next boot"

    again = site.play("firewall.yml", "--limit", name)
    assert again.returncode == 0, again.output[-3000:]
    assert ruleset(bare) == before


def test_rules_that_nft_does_not_take_change_nothing(site: Ansible, bare: BareCluster, before: str) -> None:
    wish = {"firewall_extra_rules": ["tcp dport ssh-and-more accept"]}
    outcome = site.play("firewall.yml", "--limit", bare.hosts[2].name, "-e", json.dumps(wish))
    assert outcome.returncode != 0
    assert "ssh-and-more" in outcome.output
    assert ruleset(bare) == before
