"""Facts about one machine, read without torch: processors, memory, GPUs, what the hardware computes in."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver names it."""

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]


@dataclass(frozen=True)
class MachineFacts:
    """What a plan needs to know of a node."""

    name: str
    cpu_count: int
    memory_bytes: int
    cpu_bf16: bool
    gpus: tuple[Gpu, ...] = ()


def local_facts() -> MachineFacts:
    """Returns the facts of this machine."""
    return MachineFacts(
        name=platform.node() or "localhost",
        cpu_count=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=_memory_bytes(),
        cpu_bf16=cpu_computes_bf16(_read("/proc/cpuinfo")),
        gpus=query_gpus(),
    )


def cpu_computes_bf16(cpuinfo: str) -> bool:
    """True when /proc/cpuinfo names instructions for bf16; without them it is emulated and slower than fp32."""
    flags = next((line for line in cpuinfo.splitlines() if line.startswith(("flags", "Features"))), "")
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(flags.split()))


def query_gpus() -> tuple[Gpu, ...]:
    """Returns the GPUs that nvidia-smi lists; none when it is missing or the driver does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_gpus(answer.stdout) if answer.returncode == 0 else ()


def parse_gpus(csv: str) -> tuple[Gpu, ...]:
    """Reads nvidia-smi's lines "name, memory in MiB, compute capability"."""
    gpus = []
    for line in csv.splitlines():
        fields = [field.strip() for field in line.rsplit(",", 2)]
        if len(fields) == 3 and fields[1].isdigit():
            major, _, minor = fields[2].partition(".")
            gpus.append(Gpu(fields[0], int(fields[1]) * 2**20, (int(major), int(minor or 0))))
    return tuple(gpus)


def _memory_bytes() -> int:
    """Returns the memory this process may use: the machine's, or less under a cgroup limit (containers)."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return min(total, int(limit)) if limit.isdigit() else total


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
