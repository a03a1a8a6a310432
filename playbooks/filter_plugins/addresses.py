"""Filters that make files of the whole cluster: names, addresses and host keys, one line a node."""

from __future__ import annotations

import ipaddress
from collections import Counter
from typing import Any

GROUPS = ("head", "gpu_nodes", "storage")
# The first that a node has goes into known_hosts: one line a node is enough.
KEY_KINDS = ("ed25519", "ecdsa", "rsa")
DEFAULT_PORT = 22


def cluster_hosts(groups: dict[str, list[str]]) -> list[str]:
    """Names of all hosts of the cluster, head first, each once."""
    return list(dict.fromkeys(name for group in GROUPS for name in groups.get(group, [])))


def node_address(variables: Any, name: str) -> str:
    """The address by which the other nodes know a host: as loopworks_private_ip by default, but seen from outside."""
    facts = variables.get("ansible_facts") or {}
    return str(
        variables.get("loopworks_private_ip")
        or (facts.get("default_ipv4") or {}).get("address")
        or variables.get("ansible_host")
        or name
    )


def hosts_lines(hostvars: Any, groups: dict[str, list[str]]) -> str:
    """Lines for /etc/hosts: address, full name where there is one, inventory name, host name.

    A host whose address is not known as a number is left out: its name has to come from the name service then.
    """
    hosts = {name: hostvars[name] for name in cluster_hosts(groups)}
    aliases = {name: _aliases(variables) for name, variables in hosts.items()}
    # The same host name on two machines (an image's own) would send one's traffic to the other.
    times = Counter(alias for names in aliases.values() for alias in dict.fromkeys(names))
    lines = []
    for name, variables in hosts.items():
        address = node_address(variables, name)
        own = [alias for alias in aliases[name] if times[alias] == 1 and alias not in hosts]
        names = [alias for alias in own if "." in alias] + [name] + [alias for alias in own if "." not in alias]
        names = [item for item in dict.fromkeys(names) if not is_address(item) and not _is_local(item)]
        if is_address(address) and names:
            lines.append(" ".join([address, *names]))
    return "\n".join(lines)


def known_hosts_lines(hostvars: Any, groups: dict[str, list[str]], existing: str = "") -> str:
    """Lines for ssh_known_hosts. A host without facts in this run keeps its line of `existing`, an earlier file."""
    earlier = {line.split(",", 1)[0].split(" ", 1)[0]: line for line in existing.splitlines() if line.strip()}
    lines = []
    for name in cluster_hosts(groups):
        variables = hostvars[name]
        key = _host_key(variables.get("ansible_facts") or {})
        if key is None:
            lines += [earlier[name]] if name in earlier else []
            continue
        names = dict.fromkeys([name, node_address(variables, name), str(variables.get("ansible_host") or name)])
        port = int(variables.get("ansible_port") or DEFAULT_PORT)
        behind_port = [f"[{item}]:{port}" for item in names] if port != DEFAULT_PORT else []
        lines.append(f"{','.join([*names, *behind_port])} {key}")
    return "\n".join(lines)


def ssh_patterns(groups: dict[str, list[str]], networks: list[str]) -> str:
    """What stands behind `Host` in ssh_config for all nodes: few patterns instead of a name a node.

    Digits of names become `?`. Networks become their whole octets and `*`, wider than the network where its prefix is
    not a multiple of 8 (the pattern only chooses a key, it opens nothing).
    """
    names = ["".join("?" if letter.isdigit() else letter for letter in name) for name in cluster_hosts(groups)]
    names = [pattern for name, pattern in zip(cluster_hosts(groups), names, strict=True) if not is_address(name)]
    octets = []
    for text in networks:
        network = ipaddress.ip_network(text, strict=False)
        whole = network.prefixlen // 8
        if network.version == 4 and whole:
            parts = str(network.network_address).split(".")[:whole]
            octets.append(".".join(parts) + ("" if whole == 4 else ".*"))
    return " ".join(dict.fromkeys([*names, *octets]))


def is_address(text: str) -> bool:
    """True for an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _aliases(variables: Any) -> list[str]:
    facts = variables.get("ansible_facts") or {}
    return [str(facts[key]) for key in ("fqdn", "hostname") if facts.get(key)]


def _is_local(name: str) -> bool:
    return name.split(".", 1)[0] in ("localhost", "ip6-localhost", "ip6-loopback")


def _host_key(facts: Any) -> str | None:
    for kind in KEY_KINDS:
        key = facts.get(f"ssh_host_key_{kind}_public")
        if key:
            return f"{facts.get(f'ssh_host_key_{kind}_public_keytype') or f'ssh-{kind}'} {key}"
    return None


class FilterModule:
    """What Ansible looks for in this file."""

    def filters(self) -> dict[str, Any]:
        """Names of the filters."""
        return {
            "hosts_lines": hosts_lines,
            "known_hosts_lines": known_hosts_lines,
            "node_address": node_address,
            "ssh_patterns": ssh_patterns,
        }
