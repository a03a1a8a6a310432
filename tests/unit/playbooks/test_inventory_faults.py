"""What cannot work in an inventory is said with host, variable, cause and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.playbooks.plugins import load

ROOT = Path(__file__).resolve().parents[3]
filters = load("filter_plugins/cluster.py")

GOOD = {"loopworks_cluster_cidr": "10.20.0.0/16", "loopworks_allowed_cidrs": ["10.1.0.0/16"]}


def faults(head: list[str] | None = None, **variables: Any) -> list[str]:
    heads = ["head1"] if head is None else head
    hosts = [*heads, "gpu1", "gpu2"]
    groups = {"all": hosts, "head": heads, "gpu_nodes": ["gpu1", "gpu2"]}
    values: dict[str, dict[str, Any]] = {
        name: {"ansible_host": f"10.20.0.{n}", **GOOD, **variables} for n, name in enumerate(hosts)
    }
    return list(filters.inventory_faults(values, groups))


def test_a_good_inventory_has_none() -> None:
    assert faults() == []
    assert faults(nvidia_version="580.126.09") == []
    assert faults(nvidia_driver_branch=595, nvidia_version="595.71.05") == []
    assert faults(nvidia_driver_branch="580", loopworks_storage={"kind": "nfs", "mount_point": "/shared"}) == []


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({"nvidia_driver_branch": 570}, ["all hosts", "nvidia_driver_branch", "570 no longer gets updates", "580"]),
        ({"nvidia_driver_branch": "newest"}, ["newest is not a branch", "580, 595, 620"]),
        (
            {"nvidia_version": "595.71.05"},
            ["all hosts: nvidia_version: 595.71.05 is not of branch 580", "Set nvidia_driver_branch to 595 too"],
        ),
        ({"nvidia_version": "570.124.06"}, ["is not of branch 580", "Take a version such as 580.126.09"]),
        ({"nvidia_version": 580}, ["580 is not of branch 580"]),
        ({"nvidia_driver_branch": "620", "nvidia_version": "580.126.09"}, ["is not of branch 620", "to 580 too"]),
        ({"loopworks_allowed_cidrs": ["0.0.0.0/0"]}, ["whole internet", "6379", "loopworks_open_to_world"]),
        ({"loopworks_allowed_cidrs": ["::/0"]}, ["whole internet"]),
        ({"loopworks_allowed_cidrs": ["10.0.0.1/8"]}, ["loopworks_allowed_cidrs", "host bits", "10.20.0.0/16"]),
        ({"loopworks_cluster_cidr": ""}, ["loopworks_cluster_cidr is not set"]),
        ({"loopworks_cluster_cidr": "0.0.0.0/0", "loopworks_open_to_world": True}, ["loopworks_cluster_cidr"]),
        ({"ssh_admin_keys": ["/nowhere/key.pub"]}, ["ssh_admin_keys", "no file /nowhere/key.pub", "ssh-keygen"]),
        ({"loopworks_storage": {"kind": "ceph"}}, ["loopworks_storage.kind", "ceph is unknown", "nfs"]),
        ({"loopworks_storage": {"kind": "efs"}}, ["loopworks_storage.source", "fstab"]),
        ({"ansible_host": "10.20.0.9"}, ["head1, gpu1, gpu2", "ansible_host is 10.20.0.9 for each"]),
    ],
)
def test_a_fault_names_variable_cause_and_remedy(variables: dict[str, Any], names: list[str]) -> None:
    (fault,) = faults(**variables)
    for name in names:
        assert name in fault


@pytest.mark.parametrize(
    "efa",
    [
        {"loopworks_provider": "aws"},
        {"loopworks_provider": "aws", "loopworks_efa_enabled": True, "loopworks_efa_count": 4},
        {"loopworks_efa_enabled": "true"},
        {"loopworks_efa_enabled": False, "loopworks_efa_count": "4"},
    ],
)
def test_two_stacks_of_rdma_are_refused_on_nodes_with_efa(efa: dict[str, Any]) -> None:
    (fault,) = faults(rdma_stack="doca", **efa)
    assert fault.startswith("gpu1, gpu2: rdma_stack: doca cannot be on a node with EFA"), "the head has neither"
    assert "Set rdma_stack: inbox" in fault
    assert faults(rdma_stack="inbox", **efa) == []


@pytest.mark.parametrize(
    "plain",
    [{}, {"loopworks_provider": "private"}, {"loopworks_provider": "aws", "loopworks_efa_enabled": False}],
)
def test_doca_may_be_where_there_is_no_efa(plain: dict[str, Any]) -> None:
    assert faults(rdma_stack="doca", **plain) == []


def test_branches_are_those_of_the_role() -> None:
    role = ROOT / "playbooks/roles/nvidia"
    option = yaml.safe_load((role / "meta/argument_specs.yml").read_text())["argument_specs"]["main"]["options"]
    branch = option["nvidia_driver_branch"]
    assert (tuple(branch["choices"]), branch["default"]) == (filters.BRANCHES, filters.DEFAULT_BRANCH)


def test_the_override_opens_to_the_world() -> None:
    assert faults(loopworks_allowed_cidrs=["0.0.0.0/0"], loopworks_open_to_world=True) == []


def test_there_is_one_head() -> None:
    assert "it has no host" in faults(head=[])[0]
    assert "it has 2 hosts (a, b)" in faults(head=["a", "b"])[0]


def test_a_key_may_stand_in_the_inventory_itself() -> None:
    assert faults(ssh_admin_keys=["ssh-ed25519 AAAA someone"]) == []


def test_all_faults_come_at_once_and_the_same_one_once() -> None:
    found = faults(nvidia_driver_branch="515", loopworks_allowed_cidrs=["0.0.0.0/0"])
    assert len(found) == 2
    assert all(line.startswith("all hosts: ") for line in found)
