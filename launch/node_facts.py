"""Facts about a node, read on the node itself. Standard library only: its source is sent over SSH and run there.

`collect` answers one request with plain values; what they mean is decided on the control side (launch/preflight.py).
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from launch.machine import local_facts
from training.drain import drain_mark, drain_reason

PACKAGES = ("torch", "deepspeed", "numpy", "pydantic", "psutil")
TOOL_TIMEOUT_S = 15


def collect(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the facts of this node. Request: paths, token (a file to look for), code, run_dir, port, deep."""
    address = (os.environ.get("SSH_CONNECTION", "").split() + [""] * 4)[2] or "127.0.0.1"
    facts: dict[str, Any] = {
        "clock": time.time(),
        "machine": asdict(local_facts()),
        "hostname": platform.node(),
        "home": str(Path.home()),
        "address": address,
        "interface": interface_of(address),
        "python": sys.executable,
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
            "cuda": torch_cuda(),
            "nccl": nccl(),
        },
        "limits": {"memlock": _limit(resource.RLIMIT_MEMLOCK), "nofile": _limit(resource.RLIMIT_NOFILE)},
        "shm_bytes": _free("/dev/shm"),
        "paths": {path: path_facts(path) for path in request.get("paths", [])},
        "node_folder": path_facts(str(Path.home() / ".loopworks")),
        "token": Path(request["token"]).exists() if request.get("token") else None,
        "code": Path(request["code"].replace("~", str(Path.home()), 1)).is_dir() if request.get("code") else False,
        "ports": free_ports(2, request.get("port")),
        "port_free": port_is_free(request["port"]) if request.get("port") else None,
        "infiniband": infiniband_ports(),
        "efa": efa_devices() if infiniband_ports() else 0,
        "drained": drain_reason(drain_mark()),
    }
    if request.get("deep"):
        facts |= {"driver": driver(), "ecc_errors": ecc_errors(), "xid": xid_lines()}
        facts["driver_cuda"] = driver_cuda()
        facts["fabric_manager"] = _tool("systemctl", "is-active", "nvidia-fabricmanager")
        facts["nvlink"] = _tool("nvidia-smi", "nvlink", "--status")
    return facts


def drained(request: dict[str, Any]) -> dict[str, Any]:
    """Returns why this node is drained; None when it is not."""
    return {"reason": drain_reason(drain_mark())}


def interface_of(address: str) -> str:
    """Returns the network interface that has `address`; empty when none is found."""
    listing = _tool("ip", "-o", "addr", "show")
    for line in listing.splitlines():
        words = line.split()
        if len(words) > 3 and words[3].split("/")[0] == address:
            return words[1]
    return "lo" if address in ("127.0.0.1", "::1") else ""


def path_facts(path: str) -> dict[str, Any]:
    """Returns whether a path is there and writable, and what is free on its file system."""
    place = Path(path)
    existing = next((folder for folder in (place, *place.parents) if folder.exists()), Path("/"))
    return {"exists": place.exists(), "writable": os.access(existing, os.W_OK), "free_bytes": _free(str(existing))}


def free_ports(count: int, first: int | None = None) -> list[int]:
    """Returns ports that nothing listens on; `first`, when given, is one of them in any case."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("", 0))
        ports = [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
    return [first, *ports[1:]] if first else ports


def port_is_free(port: int, address: str = "") -> bool:
    """True when a server could listen on `port` of `address`, or of all addresses."""
    with contextlib.closing(socket.socket()) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((address, port))
        except OSError:
            return False
        return True


def listen_once(request: dict[str, Any]) -> dict[str, Any]:
    """Listens on `port` for `seconds`, answering everyone: the other end of `reach`."""
    ends, callers = time.monotonic() + float(request["seconds"]), 0
    with contextlib.closing(socket.socket()) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", int(request["port"])))
        server.listen(128)
        while callers < int(request["callers"]) and (left := ends - time.monotonic()) > 0:
            server.settimeout(left)
            with contextlib.suppress(TimeoutError, socket.timeout):  # noqa: UP041
                server.accept()[0].close()
                callers += 1
    return {"callers": callers}


def reach(request: dict[str, Any]) -> dict[str, Any]:
    """Connects to `address`:`port`, trying until `seconds` are over; says why when it cannot."""
    ends, reason = time.monotonic() + float(request["seconds"]), "no answer"
    while time.monotonic() < ends:
        try:
            socket.create_connection((request["address"], int(request["port"])), timeout=2).close()
            return {"reached": True, "reason": ""}
        except OSError as error:
            reason = error.strerror or str(error) or "no answer"
            time.sleep(0.1)
    return {"reached": False, "reason": reason}


def infiniband_ports() -> list[dict[str, str]]:
    """Returns the RDMA ports (InfiniBand, RoCE, EFA) with their state, from sysfs."""
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
    return [{"device": port.parts[-3], "port": port.name, "state": _read(port / "state")} for port in ports]


def driver() -> str:
    """Returns the version of the NVIDIA driver; empty without one."""
    lines = _tool("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return lines[0].strip() if lines else ""


def driver_cuda() -> str:
    """Returns the newest CUDA that the NVIDIA driver runs; empty without one."""
    found = re.search(r"CUDA Version\s*:\s*(\d+\.\d+)", _tool("nvidia-smi", "--query"))
    return found.group(1) if found else ""


def torch_cuda() -> str:
    """Returns the CUDA that torch was built for, as its version file says (torch is not imported: that takes seconds).

    Empty without CUDA.
    """
    try:
        path = metadata.distribution("torch").locate_file("torch/version.py")
        text = Path(str(path)).read_text(encoding="utf-8")
    except (OSError, metadata.PackageNotFoundError):
        return ""
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return found.group(1) if found else ""


def nccl() -> str:
    """Returns the version of the NCCL that was installed with torch (nvidia-nccl-cuNN); empty when there is none."""
    for found in metadata.distributions():
        if str(found.metadata["Name"]).lower().startswith("nvidia-nccl-"):
            return found.version
    return ""


def ecc_errors() -> int:
    """Returns the uncorrected memory errors of all GPUs since their last reset."""
    query = "--query-gpu=ecc.errors.uncorrected.volatile.total"
    lines = _tool("nvidia-smi", query, "--format=csv,noheader,nounits").splitlines()
    return sum(int(line) for line in lines if line.strip().isdigit())


def xid_lines() -> list[str]:
    """Returns the last Xid reports of the driver in the kernel's log."""
    return [line for line in _tool("dmesg").splitlines() if "NVRM: Xid" in line][-5:]


def efa_devices() -> int:
    """Returns how many EFA devices libfabric offers."""
    return sum(1 for line in _tool("fi_info", "-p", "efa", "-t", "FI_EP_RDM").splitlines() if "provider:" in line)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _limit(which: int) -> int:
    return resource.getrlimit(which)[0]


def _free(path: str) -> int:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _tool(*command: str) -> str:
    """Returns what a tool prints; empty when it is missing, fails or does not come back."""
    search = os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/opt/amazon/efa/bin"
    path = shutil.which(command[0], path=search)
    if path is None:
        return ""
    try:
        done = subprocess.run([path, *command[1:]], capture_output=True, timeout=TOOL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""
