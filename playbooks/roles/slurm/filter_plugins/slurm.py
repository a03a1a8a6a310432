"""Lines of slurm.conf and gres.conf from the facts of the nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Total memory differs by a little from kernel to kernel: whole steps keep the file the same.
MEMORY_STEP_MIB = 256


def node_line(name: str, address: str, facts: Mapping[str, Any], memory_ratio: float) -> str:
    """Returns the NodeName line of one node. `facts` are ansible_facts, with loopworks in them.

    Memory is in MiB, a part of what the kernel has: Slurm drains a node that has less than its line says.
    """
    parts = [f"NodeName={name}", f"NodeAddr={address}"]
    if facts["hostname"] != name:
        parts.append(f"NodeHostname={facts['hostname']}")
    cpus = int(facts["processor_vcpus"])
    sockets, cores, threads = (
        int(facts[key]) for key in ("processor_count", "processor_cores", "processor_threads_per_core")
    )
    parts.append(f"CPUs={cpus}")
    # Virtual machines and containers may tell a shape that does not add up.
    if sockets * cores * threads == cpus:
        parts.append(f"Sockets={sockets} CoresPerSocket={cores} ThreadsPerCore={threads}")
    memory = int(int(facts["memtotal_mb"]) * memory_ratio) // MEMORY_STEP_MIB * MEMORY_STEP_MIB
    parts.append(f"RealMemory={max(memory, MEMORY_STEP_MIB)}")
    gpus = int(facts["loopworks"]["gpu_count"])
    if gpus:
        parts.append(f"Gres=gpu:{gpus}")
    return " ".join([*parts, "State=UNKNOWN"])


def node_lines(names: Sequence[str], hostvars: Any, memory_ratio: float, existing: str = "") -> list[str]:
    """Returns the lines of all nodes. One without facts in this run keeps its line of `existing`, an earlier file.

    A node that has neither is left out: it joins when it has been reached.
    """
    earlier = {
        line.split()[0].removeprefix("NodeName="): line
        for line in existing.splitlines()
        if line.startswith("NodeName=")
    }
    lines = []
    for name in names:
        known = hostvars[name]
        facts = known.get("ansible_facts") or {}
        if "loopworks" not in facts or "processor_vcpus" not in facts:
            lines += [earlier[name]] if name in earlier else []
            continue
        default = (facts.get("default_ipv4") or {}).get("address")
        address = known.get("loopworks_private_ip") or default or known.get("ansible_host") or name
        lines.append(node_line(name, str(address), facts, memory_ratio))
    return lines


def gres_lines(gpu_count: int) -> str:
    """Returns gres.conf of a node: its GPUs by device file, since Debian's Slurm is built without NVML."""
    if not gpu_count:
        return ""
    devices = "/dev/nvidia0" if gpu_count == 1 else f"/dev/nvidia[0-{gpu_count - 1}]"
    return f"Name=gpu File={devices}\n"


class FilterModule:
    """What Ansible looks for in this file."""

    def filters(self) -> dict[str, Any]:
        """Names of the filters."""
        return {"slurm_node_lines": node_lines, "slurm_gres_lines": gres_lines}
