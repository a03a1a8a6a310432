"""Health checks of a node: functions from facts to results. health.py finds the facts and writes the results.

Lies beside health.py on a node, and like that needs nothing but Python 3.9. A check that does not apply to the node
gives None.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

OK, WARNING, FAILED = "ok", "warning", "failed"
# After these a GPU or its link is not to be trusted (as in node_facts.py).
FATAL_XIDS = {48, 63, 64, 74, 79, 94, 95, 119, 120}
TIME_ERROR = 5  # adjtimex: the kernel's clock is not synchronised
DISK_WARNING, DISK_FAILED = 0.10, 0.05
_LOG_LINE = re.compile(r"\[\s*(\d+\.\d+)\]")


class Result(NamedTuple):
    """How a check went, and what a person should know about it."""

    status: str
    message: str = ""


class Answer(NamedTuple):
    """What a program said; `code` is None when it did not answer in time, or is not there (`missing`)."""

    code: int | None
    text: str = ""
    missing: bool = False


class Port(NamedTuple):
    """A port of an EFA or InfiniBand device."""

    device: str
    kind: str
    active: bool


@dataclass(frozen=True)
class Expected:
    """What the node should have; None: not known."""

    gpus: int | None = None
    efa: int = 0
    infiniband: int = 0
    mounts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What was found."""

    pci_gpus: int = 0
    nvswitches: int = 0
    smi: Answer = Answer(None, missing=True)
    fabric_manager: Answer = Answer(None, missing=True)
    loaded_driver: str = ""
    installed_driver: str = ""
    kernel_log: Sequence[str] = ()
    boot_s: float = 0.0
    xids_handled_s: float = 0.0
    ports: Sequence[Port] = ()
    mount_points: Sequence[str] = ()
    file_systems: dict[str, Answer] = field(default_factory=dict)
    clock_state: int = 0
    limits: str = ""


def check_nvidia_smi(facts: Facts, expected: Expected) -> Result | None:
    """Whether the driver answers at all."""
    if not _wants_gpus(facts, expected):
        return None
    if facts.smi.missing:
        return Result(FAILED, "nvidia-smi is not installed")
    if facts.smi.code is None:
        return Result(FAILED, "nvidia-smi does not answer")
    if facts.smi.code != 0:
        return Result(FAILED, f"nvidia-smi: {first_line(facts.smi.text)}")
    return Result(OK)


def check_gpu_count(facts: Facts, expected: Expected) -> Result | None:
    """Whether all GPUs are there: those that were promised, or those that PCI shows."""
    if not _wants_gpus(facts, expected) or facts.smi.code != 0:
        return None  # nvidia_smi has failed already
    wanted = facts.pci_gpus if expected.gpus is None else expected.gpus
    found = len(_smi_rows(facts.smi))
    if found == wanted:
        return Result(OK)
    return Result(FAILED, f"{found} GPUs answer, {wanted} are expected (PCI shows {facts.pci_gpus})")


def check_gpu_ecc(facts: Facts, expected: Expected) -> Result | None:
    """Whether memory is free of uncorrectable errors; GPUs without ECC say nothing."""
    counts = {row[0]: row[2] for row in _smi_rows(facts.smi) if len(row) == 3 and row[2].isdigit()}
    if not counts:
        return None
    bad = [f"GPU {gpu}: {count}" for gpu, count in counts.items() if int(count)]
    return Result(FAILED, "uncorrectable memory errors: " + ", ".join(bad)) if bad else Result(OK)


def check_gpu_xid(facts: Facts, expected: Expected) -> Result | None:
    """Whether the kernel log is free of XIDs that tell of hardware."""
    if not _wants_gpus(facts, expected):
        return None
    seen = sorted(set(_fatal_xids(facts.kernel_log, facts.boot_s, facts.xids_handled_s)))
    return Result(FAILED, "kernel log: " + ", ".join(seen)) if seen else Result(OK)


def check_fabric_manager(facts: Facts, expected: Expected) -> Result | None:
    """Whether the fabric manager runs where NVSwitches are: without it, no process can use more than one GPU."""
    if not facts.nvswitches:
        return None
    state = first_line(facts.fabric_manager.text) or "not known"
    return Result(OK) if state == "active" else Result(FAILED, f"nvidia-fabricmanager is {state}")


def check_driver(facts: Facts, expected: Expected) -> Result | None:
    """Whether the loaded module, the libraries and the installed module are one version."""
    answered = {row[1] for row in _smi_rows(facts.smi) if len(row) == 3}
    if not facts.loaded_driver or not answered:
        return None
    if answered != {facts.loaded_driver}:
        return Result(FAILED, f"module {facts.loaded_driver} is loaded, nvidia-smi is of {', '.join(sorted(answered))}")
    if facts.installed_driver and facts.installed_driver != facts.loaded_driver:
        return Result(WARNING, f"module {facts.installed_driver} is installed, {facts.loaded_driver} loaded: boot")
    return Result(OK)


def check_efa(facts: Facts, expected: Expected) -> Result | None:
    """Whether all EFA devices are there with an active port."""
    return _fabric("efa", facts.ports, expected.efa)


def check_infiniband(facts: Facts, expected: Expected) -> Result | None:
    """Whether all InfiniBand devices are there with an active port."""
    return _fabric("infiniband", facts.ports, expected.infiniband)


def check_clock(facts: Facts, expected: Expected) -> Result | None:
    """Whether the clock follows others."""
    return Result(WARNING, "the clock is not synchronised") if facts.clock_state == TIME_ERROR else Result(OK)


def check_memlock(facts: Facts, expected: Expected) -> Result | None:
    """Whether a run may lock its memory, without which there is no RDMA."""
    if not expected.efa and not expected.infiniband:
        return None
    allowed = set()
    for line in facts.limits.splitlines():
        words = line.split("#")[0].split()
        if len(words) == 4 and words[2] == "memlock" and words[3] in ("unlimited", "infinity", "-1"):
            allowed |= {"soft", "hard"} if words[1] == "-" else {words[1]}
    if allowed >= {"soft", "hard"}:
        return Result(OK)
    return Result(FAILED, "locked memory is limited: /etc/security/limits.d needs `* - memlock unlimited`")


def check_mount(path: str, facts: Facts) -> Result:
    """Whether a file system is mounted and answers."""
    if path not in facts.mount_points:
        return Result(FAILED, f"{path} is not mounted")
    answer = facts.file_systems.get(path, Answer(None))
    if answer.code is None:
        return Result(FAILED, f"{path} does not answer")
    return Result(OK) if answer.code == 0 else Result(FAILED, f"{path}: {first_line(answer.text)}")


def check_disk(facts: Facts, expected: Expected) -> Result | None:
    """Whether there is room on the node's own disk."""
    answer = facts.file_systems.get("/", Answer(None))
    if answer.code != 0:
        return Result(FAILED, "the file system of / does not answer")
    blocks, free = (int(word) for word in answer.text.split()[:2])
    ratio = free / blocks if blocks else 1.0
    if ratio >= DISK_WARNING:
        return Result(OK)
    return Result(FAILED if ratio < DISK_FAILED else WARNING, f"{ratio:.1%} of / is free")


CHECKS = {
    "nvidia_smi": check_nvidia_smi,
    "gpu_count": check_gpu_count,
    "gpu_ecc": check_gpu_ecc,
    "gpu_xid": check_gpu_xid,
    "fabric_manager": check_fabric_manager,
    "driver": check_driver,
    "efa": check_efa,
    "infiniband": check_infiniband,
    "disk": check_disk,
    "clock": check_clock,
    "memlock": check_memlock,
}


def results(facts: Facts, expected: Expected) -> dict[str, Result]:
    """Returns the result of each check that applies; one that cannot be made has failed."""
    found: dict[str, Result] = {}
    for name, check in CHECKS.items():
        try:
            result = check(facts, expected)
        except (ValueError, IndexError) as error:
            result = Result(FAILED, f"not understood: {error}")
        if result is not None:
            found[name] = result
    for path in expected.mounts:
        found[f"mount:{path}"] = check_mount(path, facts)
    return found


def _wants_gpus(facts: Facts, expected: Expected) -> bool:
    return bool(facts.pci_gpus if expected.gpus is None else expected.gpus)


def _fabric(kind: str, ports: Sequence[Port], wanted: int) -> Result | None:
    mine = [port for port in ports if port.kind == kind]
    active = {port.device for port in mine if port.active}
    down = sorted({port.device for port in mine} - active)
    if wanted and len(active) < wanted:
        said = f"{len(active)} of {wanted} devices have an active port"
        return Result(FAILED, said + (f"; down: {', '.join(down)}" if down else ""))
    if wanted:
        return Result(OK)
    # Nobody has promised them: ports that are not cabled are common.
    return Result(WARNING, f"down: {', '.join(down)}") if down else None


def _fatal_xids(lines: Iterable[str], boot_s: float, handled_s: float) -> Iterable[str]:
    for line in lines:
        since_boot = _LOG_LINE.search(line)
        if since_boot and boot_s + float(since_boot.group(1)) <= handled_s:
            continue
        match = re.search(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)", line)
        if match and int(match.group(2)) in FATAL_XIDS:
            yield f"XID {match.group(2)} of {match.group(1).lower()}"
        elif "fallen off the bus" in line and "NVRM" in line and not match:
            yield "a GPU has fallen off the bus"


def _smi_rows(answer: Answer) -> list[list[str]]:
    if answer.code != 0:
        return []
    return [[word.strip() for word in line.split(",")] for line in answer.text.splitlines() if line.strip()]


def first_line(text: str) -> str:
    """Returns the first line of what a program said."""
    return next(iter(text.strip().splitlines()), "")
