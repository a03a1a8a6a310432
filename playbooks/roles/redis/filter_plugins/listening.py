"""Which addresses a queue must not listen on."""

from __future__ import annotations

import ipaddress
from typing import Any


def public_addresses(addresses: list[str]) -> list[str]:
    """Returns those that the world may reach: all interfaces, public addresses, and names, which nobody can judge."""
    return [address for address in addresses if _is_public(address.lstrip("-"))]


def _is_public(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return True
    return address.is_unspecified or address.is_global


class FilterModule:
    """What Ansible looks for in this file."""

    def filters(self) -> dict[str, Any]:
        """Names of the filters."""
        return {"public_addresses": public_addresses}
