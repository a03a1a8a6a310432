"""What the EFA software and the ports of InfiniBand devices say, as faults with the next step."""

from __future__ import annotations

from pathlib import Path

from tests.unit.playbooks.plugins import load

ROLES = Path(__file__).resolve().parents[3] / "playbooks/roles"


efa, rdma = (load(f"roles/{role}/filter_plugins/{role}.py") for role in ("efa", "rdma"))


def test_the_installed_version_is_read() -> None:
    assert efa.installed_version("# EFA installer version: 1.51.0\n# Debug packages installed: no\n") == "1.51.0"
    assert efa.installed_version("") == ""


def test_two_endpoints_of_one_device_count_once() -> None:
    one = "provider: efa\n    domain: rdmap16s27-rdm\nprovider: efa\n    domain: rdmap16s27-dgrm\n"
    assert efa.device_fault(one, 1) == ""
    fault = efa.device_fault(one, 4)
    assert "1 of 4 EFA devices (rdmap16s27)" in fault and "security group" in fault
    assert "(none)" in efa.device_fault("", 1)


def listing(**states: str) -> str:
    lines = []
    for name, state in states.items():
        device, port = name.rsplit("_p", 1)
        lines.append(f"/sys/class/infiniband/{device}/ports/{port}/state:4: {state}")
    return "\n".join(lines)


def test_ports_that_are_down_are_named() -> None:
    assert rdma.port_faults(listing(mlx5_0_p1="ACTIVE", mlx5_1_p1="ACTIVE"), 2) == []
    (fault,) = rdma.port_faults(listing(mlx5_0_p1="ACTIVE", mlx5_1_p1="DOWN"), 2)
    assert fault.startswith("mlx5_1 port 1 is DOWN") and "cable" in fault
    (fault,) = rdma.port_faults(listing(mlx5_0_p1="ACTIVE"), 2)
    assert "1 of 2 devices" in fault


def test_a_port_without_a_cable_may_be_allowed() -> None:
    two = listing(mlx5_0_p1="ACTIVE", mlx5_0_p2="DOWN")
    assert rdma.port_faults(two, 1, all_active=False) == []
    assert rdma.port_faults(two, 1) != []
    assert rdma.port_faults(listing(mlx5_0_p1="INIT"), 1, all_active=False) != []
