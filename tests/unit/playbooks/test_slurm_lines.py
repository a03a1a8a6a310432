"""slurm.conf from facts: one line a node, stable, and none lost when a run reaches some nodes only."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.playbooks.plugins import load

ROLE = Path(__file__).resolve().parents[3] / "playbooks/roles/slurm"
slurm = load("roles/slurm/filter_plugins/slurm.py")


def facts(hostname: str, gpus: int = 8, memory_mb: int = 2_063_000, cpus: int = 192) -> dict[str, Any]:
    return {
        "hostname": hostname,
        "processor_vcpus": cpus,
        "processor_count": 2,
        "processor_cores": 48,
        "processor_threads_per_core": 2,
        "memtotal_mb": memory_mb,
        "default_ipv4": {"address": "10.0.0.7"},
        "loopworks": {"gpu_count": gpus},
    }


def test_a_node_with_eight_gpus() -> None:
    line = slurm.node_line("gpu1", "10.0.0.7", facts("ip-10-0-0-7"), 0.95)
    assert line == (
        "NodeName=gpu1 NodeAddr=10.0.0.7 NodeHostname=ip-10-0-0-7 CPUs=192 Sockets=2 CoresPerSocket=48 "
        "ThreadsPerCore=2 RealMemory=1959680 Gres=gpu:8 State=UNKNOWN"
    )


def test_a_shape_that_does_not_add_up_and_no_gpu_are_left_out() -> None:
    line = slurm.node_line("gpu1", "10.0.0.7", facts("gpu1", gpus=0, cpus=2), 0.95)
    assert "Sockets" not in line and "Gres" not in line and "NodeHostname" not in line and "CPUs=2 " in line


@given(st.integers(1024, 4_000_000), st.floats(0.5, 1.0))
def test_memory_is_never_more_than_there_is(memory_mb: int, ratio: float) -> None:
    line = slurm.node_line("gpu1", "10.0.0.7", facts("gpu1", memory_mb=memory_mb), ratio)
    memory = int(line.split("RealMemory=")[1].split()[0])
    assert memory <= memory_mb and memory % slurm.MEMORY_STEP_MIB == 0


def test_a_node_that_was_not_reached_keeps_its_line() -> None:
    hostvars = {"gpu1": {"ansible_facts": facts("gpu1")}, "gpu2": {"ansible_facts": {}}, "gpu3": {}}
    existing = "# text\nNodeName=gpu2 NodeAddr=10.0.0.8 CPUs=4 State=UNKNOWN\nPartitionName=gpu\n"
    lines = slurm.node_lines(["gpu1", "gpu2", "gpu3"], hostvars, 0.95, existing)
    assert [line.split()[0] for line in lines] == ["NodeName=gpu1", "NodeName=gpu2"]
    assert lines[1] == "NodeName=gpu2 NodeAddr=10.0.0.8 CPUs=4 State=UNKNOWN"


def test_512_nodes_take_no_time_and_512_lines() -> None:
    names = [f"gpu{n:03d}" for n in range(512)]
    hostvars = {name: {"ansible_facts": facts(name)} for name in names}
    start = time.perf_counter()
    lines = slurm.node_lines(names, hostvars, 0.95, "")
    assert len(lines) == 512 and time.perf_counter() - start < 1


def test_gres_names_the_device_files() -> None:
    assert [slurm.gres_lines(count) for count in (0, 1, 8)] == [
        "",
        "Name=gpu File=/dev/nvidia0\n",
        "Name=gpu File=/dev/nvidia[0-7]\n",
    ]
