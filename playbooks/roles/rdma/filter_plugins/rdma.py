"""What the ports of InfiniBand devices say, as faults in words."""

from __future__ import annotations

import re
from typing import Any

# PATH/sys/class/infiniband/mlx5_0/ports/1/state:4: ACTIVE
PORT = re.compile(r"infiniband/(?P<device>[^/]+)/ports/(?P<port>\d+)/state:\d+: (?P<state>\w+)")


def port_faults(listing: str, wanted: int, all_active: bool = True) -> list[str]:
    """Returns one line a fault, with the next step. `listing` is what grep -H prints of the ports' state files.

    With `all_active` every port has to be active, else one port of every device.
    """
    ports: dict[str, dict[str, str]] = {}
    for match in PORT.finditer(listing):
        ports.setdefault(match["device"], {})[match["port"]] = match["state"]
    faults = []
    if len(ports) < wanted:
        faults.append(
            f"{len(ports)} of {wanted} devices are up ({', '.join(ports) or 'none'}). Look at dmesg | grep mlx5; "
            "after a new driver the node may need a reboot"
        )
    for device, states in ports.items():
        down = [f"{device} port {port} is {state}" for port, state in states.items() if state != "ACTIVE"]
        if down and (all_active or len(down) == len(states)):
            faults.append(f"{'; '.join(down)}. Check cable, switch and subnet manager (ibstat, sminfo)")
    return faults


class FilterModule:
    """What Ansible looks for in this file."""

    def filters(self) -> dict[str, Any]:
        """Names of the filters."""
        return {"rdma_port_faults": port_faults}
