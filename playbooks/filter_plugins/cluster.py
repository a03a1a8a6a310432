"""Filters over the whole inventory: what cannot work in it, said before a host is touched."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from pathlib import Path
from typing import Any

OLDEST_BRANCH = 580
BRANCHES = ("580", "595", "620")
# Of role nvidia, for an inventory that names a version only.
DEFAULT_BRANCH = "580"
TRUE = ("true", "yes", "on", "1")
STORAGE_KINDS = ("fsx-lustre", "lustre", "efs", "nfs", "none")


def inventory_faults(hostvars: Any, groups: dict[str, list[str]]) -> list[str]:
    """Returns one line a fault, each naming host, variable, cause and remedy; empty when all is well.

    Only values that the inventory sets are looked at: defaults of roles are right by themselves.
    """
    hosts = [name for name in groups.get("all", []) if name != "localhost" or name in _cluster_hosts(groups)]
    faults = _head_faults(groups)
    if not hosts:
        return faults
    values = {name: hostvars[name] for name in hosts}
    faults += _address_faults(values)
    found = [(name, fault) for name in hosts for fault in host_faults(values[name])]
    nodes = [name for name in groups.get("gpu_nodes", []) if name in values]
    found += [(name, fault) for name in nodes for fault in fabric_faults(values[name])]
    return faults + _grouped(found, len(hosts))


def host_faults(variables: Any) -> list[str]:
    """Faults in the variables of one host, without its name."""
    return [
        *_network_faults(variables),
        *_key_faults(variables),
        *_driver_faults(variables),
        *_storage_faults(variables),
    ]


def _cluster_hosts(groups: dict[str, list[str]]) -> set[str]:
    return {name for group in ("head", "gpu_nodes", "storage") for name in groups.get(group, [])}


def _head_faults(groups: dict[str, list[str]]) -> list[str]:
    heads = groups.get("head", [])
    if len(heads) == 1:
        return []
    if not heads:
        return [
            "group head: it has no host. Name one in inventory/hosts.yml (inventory/examples/private shows a cluster), "
            "or set LOOPWORKS_STACK_OUTPUTS for an AWS stack"
        ]
    return [f"group head: it has {len(heads)} hosts ({', '.join(heads)}). Leave one; the others may be gpu_nodes"]


def _address_faults(values: dict[str, Any]) -> list[str]:
    """Two names for one machine: it would be set up twice at once, and counted twice."""
    faults = []
    for variable in ("ansible_host", "loopworks_private_ip"):
        names = defaultdict(list)
        for name, variables in values.items():
            address = variables.get(variable)
            if address:
                names[(address, variables.get("ansible_port", 22) if variable == "ansible_host" else 0)].append(name)
        faults += [
            f"{', '.join(same)}: {variable} is {address} for each of them. Leave one, or correct the address"
            for (address, _), same in names.items()
            if len(same) > 1
        ]
    return faults


def _network_faults(variables: Any) -> list[str]:
    faults = []
    allowed = variables.get("loopworks_allowed_cidrs") or []
    inside = variables.get("loopworks_cluster_cidrs") or [variables.get("loopworks_cluster_cidr")]
    if not any(inside):
        faults.append("loopworks_cluster_cidr is not set. Name the network of the nodes, such as 10.20.0.0/16")
    for variable, networks in (("loopworks_allowed_cidrs", allowed), ("loopworks_cluster_cidr", inside)):
        for text in filter(None, networks):
            try:
                network = ipaddress.ip_network(text)
            except ValueError as fault:
                faults.append(f"{variable}: {fault}. Write a network as 10.20.0.0/16")
                continue
            if network.prefixlen == 0 and not (
                variable == "loopworks_allowed_cidrs" and variables.get("loopworks_open_to_world") is True
            ):
                faults.append(
                    f"{variable}: {text} lets the whole internet reach 22, 6379 and 8888. "
                    "Name your own networks; if it has to be, set loopworks_open_to_world: true"
                )
    return faults


def _key_faults(variables: Any) -> list[str]:
    faults = []
    for variable in ("ssh_admin_keys", "ansible_ssh_private_key_file"):
        value = variables.get(variable) or []
        for item in [value] if isinstance(value, str) else value:
            if item.startswith(("ssh-", "ecdsa-", "sk-")):
                continue  # the key itself instead of a file
            if not Path(item).expanduser().is_file():
                faults.append(
                    f"{variable}: there is no file {item}. Make one with ssh-keygen -t ed25519, or correct the path"
                )
    return faults


def _driver_faults(variables: Any) -> list[str]:
    branch = str(variables.get("nvidia_driver_branch") or DEFAULT_BRANCH)
    version = str(variables.get("nvidia_version") or "")
    if branch not in BRANCHES:
        old = branch.isdigit() and int(branch) < OLDEST_BRANCH
        cause = "no longer gets updates" if old else "is not a branch that this version knows"
        return [f"nvidia_driver_branch: {branch} {cause}. Take one of {', '.join(BRANCHES)}"]
    if not version or version.startswith(f"{branch}."):
        return []
    other = version.split(".", maxsplit=1)[0]
    remedy = f"Set nvidia_driver_branch to {other} too, or take" if other in BRANCHES else "Take"
    return [
        f"nvidia_version: {version} is not of branch {branch} (nvidia_driver_branch). "
        f"{remedy} a version such as {branch}.126.09"
    ]


def fabric_faults(variables: Any) -> list[str]:
    """DOCA-OFED beside EFA on a GPU node. One of AWS has EFA unless the inventory says that it has none."""
    if variables.get("rdma_stack") != "doca":
        return []
    told = [str(variables.get(name, "")).lower() for name in ("loopworks_efa_enabled", "loopworks_efa_count")]
    has_efa = told[0] in TRUE or told[1] not in ("", "0")
    if not has_efa and (told != ["", ""] or variables.get("loopworks_provider") != "aws"):
        return []
    return [
        "rdma_stack: doca cannot be on a node with EFA, since both bring an rdma-core of their own. Set rdma_stack: "
        "inbox, or loopworks_efa_enabled: false where the node has no EFA device"
    ]


def _storage_faults(variables: Any) -> list[str]:
    storage = variables.get("loopworks_storage") or {"kind": "none"}
    kind = storage.get("kind")
    if kind not in STORAGE_KINDS:
        return [f"loopworks_storage.kind: {kind} is unknown. Take one of {', '.join(STORAGE_KINDS)}"]
    if kind not in ("none", "nfs") and not storage.get("source"):
        return [f"loopworks_storage.source: kind {kind} needs the first field of fstab, such as fs-1.example:/"]
    return []


def _grouped(found: list[tuple[str, str]], hosts: int) -> list[str]:
    """The same fault of many hosts in one line."""
    by_fault = defaultdict(list)
    for name, fault in found:
        by_fault[fault].append(name)
    lines = []
    for fault, names in by_fault.items():
        whom = "all hosts" if len(names) == hosts > 1 else ", ".join(names[:5])
        more = f" and {len(names) - 5} more" if 5 < len(names) < hosts else ""
        lines.append(f"{whom}{more}: {fault}")
    return lines


class FilterModule:
    """What Ansible looks for in this file."""

    def filters(self) -> dict[str, Any]:
        """Names of the filters."""
        return {"inventory_faults": inventory_faults}
