"""Filters over networks, for the packet filter."""

from __future__ import annotations

import ipaddress
from typing import Any


def by_family(networks: list[str]) -> dict[str, list[str]]:
    """Networks as {"ip": [...], "ip6": [...]}, sorted, without those inside another."""
    parsed = [ipaddress.ip_network(text, strict=False) for text in networks]
    four = ipaddress.collapse_addresses(item for item in parsed if isinstance(item, ipaddress.IPv4Network))
    six = ipaddress.collapse_addresses(item for item in parsed if isinstance(item, ipaddress.IPv6Network))
    return {"ip": [str(item) for item in four], "ip6": [str(item) for item in six]}


def admits(networks: list[str], address: str) -> bool:
    """True when the address lies in one of the networks, or is this machine itself."""
    found: Any = ipaddress.ip_address(address.split("%", 1)[0])
    mapped = getattr(found, "ipv4_mapped", None)
    found = mapped or found
    return found.is_loopback or any(found in ipaddress.ip_network(text, strict=False) for text in networks)


class FilterModule:
    """What Ansible looks for in this file."""

    def filters(self) -> dict[str, Any]:
        """Names of the filters."""
        return {"by_family": by_family, "admits": admits}
