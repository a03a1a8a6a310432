"""Health checks of a node, each ok, warning or failed; node_facts.py makes series of them.

    health.py --out /run/loopworks/health.json [--node FILE] [--root DIR] [--nvidia-smi PROGRAM] [--deadline-s S]

Needs nothing but Python 3.9 and is called by a timer. What the node should have is in /etc/loopworks/node.json:

    {"gpus": 8, "efa": 32, "infiniband": 0, "mounts": ["/shared"]}

Without that file, or without a key, as many GPUs are expected as PCI shows, and no fabric and no mounts. A check that
does not apply to the node is left out. Nothing here can hang: what asks a driver or a file system is another process,
which is left behind when it does not answer in time, and is not asked again while it is still there. Each check is a
function from facts to a Result; `gather` finds the facts.

An XID in the kernel log fails the node until it is booted again, or until somebody who has reset the GPU says so:
touch /run/loopworks/xid-handled.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

OK, WARNING, FAILED = "ok", "warning", "failed"
# After these a GPU or its link is not to be trusted (as in node_facts.py).
FATAL_XIDS = {48, 63, 64, 74, 79, 94, 95, 119, 120}
NVIDIA = "0x10de"
GPU_CLASSES, NVSWITCH_CLASS = ("0x0300", "0x0302"), "0x0680"
TIME_ERROR = 5  # adjtimex: the kernel's clock is not synchronised
DISK_WARNING, DISK_FAILED = 0.10, 0.05
_SMI_FIELDS = "index,driver_version,ecc.errors.uncorrected.volatile.total"
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


# Checks: from facts to a result; None where the check does not apply.


def check_nvidia_smi(facts: Facts, expected: Expected) -> Result | None:
    """Whether the driver answers at all."""
    if not _wants_gpus(facts, expected):
        return None
    if facts.smi.missing:
        return Result(FAILED, "nvidia-smi is not installed")
    if facts.smi.code is None:
        return Result(FAILED, "nvidia-smi does not answer")
    if facts.smi.code != 0:
        return Result(FAILED, f"nvidia-smi: {_first_line(facts.smi.text)}")
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
    state = _first_line(facts.fabric_manager.text) or "not known"
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
    return Result(OK) if answer.code == 0 else Result(FAILED, f"{path}: {_first_line(answer.text)}")


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


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")


# Facts: everything that may hang is a process with a deadline.


class Question:
    """A program that was started; its answer is fetched later, so that several can be waited for at once.

    `left` maps commands to the processes that earlier calls have left behind, which a driver or a file system holds.
    """

    def __init__(self, left: dict[str, int], *command: str) -> None:
        self._left, self._command = left, " ".join(command)
        self._process: subprocess.Popen[str] | None = None
        self._stuck = _is_alive(left.get(self._command))
        if self._stuck:
            return
        left.pop(self._command, None)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
            )
        except OSError:
            return

    def answer(self, deadline: float) -> Answer:
        """Waits until `deadline` (monotonic). A program that the kernel holds cannot be ended: it is left behind."""
        if self._process is None:
            return Answer(None, missing=not self._stuck)
        try:
            # At the deadline too: what has answered while others were waited for still has to be read.
            text, _ = self._process.communicate(timeout=max(0.2, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._left[self._command] = self._process.pid
            return Answer(None)
        return Answer(self._process.returncode, text)


def _is_alive(pid: int | None) -> bool:
    """Whether a process is there that is no zombie."""
    state = re.search(r"^State:\s+(\w)", _text(Path(f"/proc/{pid}/status")), re.MULTILINE) if pid else None
    return state is not None and state.group(1) not in "ZX"


def read_left(report: Path) -> dict[str, int]:
    """Returns what an earlier call has left behind: command to process id."""
    try:
        found = json.loads(report.read_text(encoding="utf-8")).get("left", {})
        return {str(command): int(pid) for command, pid in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}  # the first call, or a report of another shape


def read_expected(path: Path) -> Expected:
    """Reads node.json. Raises ValueError when it is of another shape."""
    if not path.is_file():
        return Expected()
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError("not an object")
    gpus, mounts = values.get("gpus"), values.get("mounts", [])
    counts = [values.get("efa", 0), values.get("infiniband", 0), 0 if gpus is None else gpus]
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        raise ValueError("gpus, efa and infiniband are numbers from 0")
    if not isinstance(mounts, list) or not all(isinstance(mount, str) and mount.startswith("/") for mount in mounts):
        raise ValueError("mounts is a list of paths")
    return Expected(gpus, counts[0], counts[1], tuple(mounts))


def gather(root: Path, nvidia_smi: str, deadline_s: float, expected: Expected, left: dict[str, int]) -> Facts:
    """Returns the facts of this node; takes at most about `deadline_s`. Updates `left`."""
    smi = Question(left, nvidia_smi, f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader,nounits")
    manager = Question(left, "systemctl", "is-active", "nvidia-fabricmanager")
    module = Question(left, "modinfo", "-F", "version", "nvidia")
    kernel = Question(left, "dmesg")
    systems = {path: Question(left, "stat", "-f", "-c", "%b %a", "--", path) for path in ("/", *expected.mounts)}
    deadline = time.monotonic() + deadline_s
    installed, log = module.answer(deadline), kernel.answer(deadline)
    devices = [(_text(path / "vendor"), _text(path / "class")) for path in root.glob("sys/bus/pci/devices/*")]
    mine = [kind for vendor, kind in devices if vendor == NVIDIA]
    limit_files = [root / "etc/security/limits.conf", *sorted(root.glob("etc/security/limits.d/*.conf"))]
    boot = re.search(r"^btime (\d+)", _text(root / "proc/stat"), re.MULTILINE)
    handled = root / "run/loopworks/xid-handled"
    return Facts(
        pci_gpus=sum(kind.startswith(GPU_CLASSES) for kind in mine),
        nvswitches=sum(kind.startswith(NVSWITCH_CLASS) for kind in mine),
        smi=smi.answer(deadline),
        fabric_manager=manager.answer(deadline),
        loaded_driver=_text(root / "sys/module/nvidia/version"),
        installed_driver=_first_line(installed.text) if installed.code == 0 else "",
        kernel_log=log.text.splitlines() if log.code == 0 else _text(root / "var/log/kern.log").splitlines(),
        boot_s=float(boot.group(1)) if boot else 0.0,
        xids_handled_s=handled.stat().st_mtime if handled.exists() else 0.0,
        ports=list(_ports(root)),
        mount_points=[_unescape(line.split()[1]) for line in _text(root / "proc/self/mounts").splitlines()],
        file_systems={path: question.answer(deadline) for path, question in systems.items()},
        clock_state=clock_state(),
        limits="\n".join(_text(path) for path in limit_files),
    )


def clock_state() -> int:
    """Returns what the kernel says of its clock (adjtimex, asked and not set); 0 where it cannot be asked."""
    try:
        # struct timex has some 200 bytes; all zero is a question.
        return int(ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512)))
    except (OSError, AttributeError):
        return 0


def write_whole(path: Path, text: str) -> None:
    """Replaces a file: a reader sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        if temporary.exists():
            temporary.unlink()


def main(arguments: list[str] | None = None) -> int:
    """Writes the results and prints those that are not ok; returns 1 only when they could not be written."""
    parser = argparse.ArgumentParser(description="health checks of this node")
    parser.add_argument("--out", type=Path, default=Path("/run/loopworks/health.json"))
    parser.add_argument("--node", type=Path, default=None, help="what the node should have")
    parser.add_argument("--root", type=Path, default=Path("/"), help="where /sys, /proc, /etc, /run and /var are read")
    parser.add_argument("--nvidia-smi", default="nvidia-smi")
    parser.add_argument("--deadline-s", type=float, default=10.0, help="how long anything may take to answer")
    options = parser.parse_args(arguments)
    node = options.node or options.root / "etc/loopworks/node.json"
    found: dict[str, Result] = {}
    try:
        expected = read_expected(node)
    except (OSError, ValueError) as error:
        expected, found["node_json"] = Expected(), Result(FAILED, f"{node}: {error}")
    left = read_left(options.out)
    found.update(results(gather(options.root, options.nvidia_smi, options.deadline_s, expected, left), expected))
    report = {
        "time": time.time(),
        "checks": {name: result.status for name, result in found.items()},
        "messages": {name: result.message for name, result in found.items() if result.message},
        "left": left,
    }
    for name, result in found.items():
        if result.status != OK:
            print(f"{result.status} {name}: {result.message}")
    try:
        write_whole(options.out, json.dumps(report, indent=1) + "\n")
    except OSError as error:
        print(f"error: cannot write {options.out}: {error.strerror}\n  next: name another --out", file=sys.stderr)
        return 1
    return 0


def _ports(root: Path) -> Iterable[Port]:
    for port in sorted(root.glob("sys/class/infiniband/*/ports/*")):
        device = port.parent.parent
        driver = device / "device" / "driver"
        is_efa = driver.exists() and driver.resolve().name == "efa"
        kind = "efa" if is_efa or device.name.startswith(("efa", "rdmap")) else "infiniband"
        yield Port(device.name, kind, "ACTIVE" in _text(port / "state"))


def _unescape(mount_point: str) -> str:
    return mount_point.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""  # not on this machine


if __name__ == "__main__":
    sys.exit(main())
