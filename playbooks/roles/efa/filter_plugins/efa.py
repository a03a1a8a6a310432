"""What the EFA software says of itself."""

from __future__ import annotations

import re
from typing import Any

VERSION = re.compile(r"^#\s*EFA installer version:\s*(\S+)", re.MULTILINE | re.IGNORECASE)
DOMAIN = re.compile(r"^\s*domain:\s*(\S+)", re.MULTILINE)


def installed_version(text: str) -> str:
    """Returns the version in /opt/amazon/efa_installed_packages; empty where nothing is installed."""
    found = VERSION.search(text)
    return found[1] if found else ""


def device_fault(fi_info: str, wanted: int) -> str:
    """Returns what is wrong with the devices that `fi_info -p efa` lists, and the next step; else an empty text."""
    # rdmap16s27-rdm and rdmap16s27-dgrm are one device.
    devices = {re.sub(r"-(rdm|dgrm)$", "", domain) for domain in DOMAIN.findall(fi_info)}
    if len(devices) >= wanted:
        return ""
    return (
        f"efa: libfabric sees {len(devices)} of {wanted} EFA devices ({', '.join(sorted(devices)) or 'none'}). "
        "Reboot the node after a new driver; then look at the instance's network interfaces and at its security group, "
        "which has to let all traffic pass within itself, in and out"
    )


class FilterModule:
    """What Ansible looks for in this file."""

    def filters(self) -> dict[str, Any]:
        """Names of the filters."""
        return {"efa_installed_version": installed_version, "efa_device_fault": device_fault}
