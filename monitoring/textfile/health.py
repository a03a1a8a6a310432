"""Health checks of a node, each ok, warning or failed; node_facts.py makes series of them.

    health.py --out /run/loopworks/health.json [--node FILE] [--root DIR] [--nvidia-smi PROGRAM] [--deadline-s S]

Needs nothing but Python 3.9 and health_checks.py beside it, and is called by a timer. What the node should have is in
/etc/loopworks/node.json:

    {"gpus": 8, "efa": 32, "infiniband": 0, "mounts": ["/shared"]}

Without that file, or without a key, as many GPUs are expected as PCI shows, and no fabric and no mounts. A check that
does not apply to the node is left out. Nothing here can hang: what asks a driver or a file system is another process,
which is left behind when it does not answer in time, and is not asked again while it is still there.

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
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from monitoring.textfile.health_checks import FAILED, OK, Answer, Expected, Facts, Port, Result, first_line, results
else:  # a script on a node: no package there, and the checks are in the same folder
    from health_checks import FAILED, OK, Answer, Expected, Facts, Port, Result, first_line, results

NVIDIA = "0x10de"
GPU_CLASSES, NVSWITCH_CLASS = ("0x0300", "0x0302"), "0x0680"
_SMI_FIELDS = "index,driver_version,ecc.errors.uncorrected.volatile.total"


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
        installed_driver=first_line(installed.text) if installed.code == 0 else "",
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
