"""Looks at all nodes before a run starts, and lists everything that is wrong with any of them.

A check is a function from facts to findings; to add one, write it and put it into QUICK or DEEP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from launch.errors import LoopworksError
from launch.ssh import HostError
from training.drain import DRAIN_MARK
from training.errors import EXIT_PREFLIGHT

Facts = Mapping[str, Any]
LARGEST_CLOCK_OFFSET_S = 2.0
LEAST_NOFILE = 4096
LEAST_SHM_BYTES = 64 * 2**20
LEAST_FREE_BYTES = 2**30
NODE_FOLDER = "~/.loopworks"
LEAST_NODE_BYTES = 32 * 2**20
SAME_VERSIONS = ("torch", "deepspeed")


@dataclass(frozen=True)
class Finding:
    """One thing that was found: `level` ok, warn or fail."""

    check: str
    node: str
    level: Literal["ok", "warn", "fail"]
    message: str
    remedy: str = ""


class PreflightError(LoopworksError):
    """At least one node cannot take part; carries all findings."""

    exit_code = EXIT_PREFLIGHT

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = list(findings)
        failed = [finding for finding in self.findings if finding.level == "fail"]
        lines = [f"{item.node}: {item.check}: {item.message}" for item in failed]
        remedies = list(dict.fromkeys(f"{item.node}: {item.remedy}" for item in failed if item.remedy))
        super().__init__(
            "\n  - ".join([f"preflight found {len(failed)} fault(s):", *lines]), "\n        ".join(remedies)
        )


@dataclass(frozen=True)
class Wanted:
    """What the checks compare with."""

    run_dir: str
    data_paths: tuple[str, ...] = ()
    port: int | None = None


Check = Callable[[Mapping[str, Facts], Wanted], list[Finding]]


def reachable(answers: Mapping[str, Facts | HostError]) -> list[Finding]:
    """Every node answers, shows the host key that is known and takes our key."""
    found = []
    for node, answer in answers.items():
        if isinstance(answer, HostError):
            cause = answer.cause.removeprefix(f"{node}: ")
            found.append(Finding(answer.kind.replace("_", " "), node, "fail", cause, answer.remedy))
        else:
            found.append(Finding("reachable", node, "ok", answer.get("hostname", "")))
    return found


def same_versions(facts: Mapping[str, Facts], wanted: Wanted) -> list[Finding]:
    """Ranks that talk to each other need the same torch and DeepSpeed, and Python to the minor version."""
    found = []
    for name in (*SAME_VERSIONS, "python"):
        versions = {node: _short(name, fact["versions"].get(name, "")) for node, fact in facts.items()}
        usual = Counter(versions.values()).most_common(1)[0][0]
        for node, version in versions.items():
            if not version:
                remedy = "install it there, or name the right one with --python"
                found.append(Finding(name, node, "fail", f"{name} is not installed in {facts[node]['python']}", remedy))
            elif version != usual:
                remedy = f"install {name} {usual} there, or leave the node out"
                found.append(Finding(name, node, "fail", f"{name} {version}, the others have {usual}", remedy))
            else:
                found.append(Finding(name, node, "ok", version))
    return found


def clocks(facts: Mapping[str, Facts], wanted: Wanted) -> list[Finding]:
    """Clocks agree with this machine's: certificates, leases and logs need it."""
    found = []
    for node, fact in facts.items():
        offset = fact["clock_offset_s"]
        if abs(offset) > LARGEST_CLOCK_OFFSET_S:
            found.append(Finding("clock", node, "fail", f"{offset:+.1f} s off", "start chrony or systemd-timesyncd"))
        else:
            found.append(Finding("clock", node, "ok", f"{offset:+.2f} s"))
    return found


def paths(facts: Mapping[str, Facts], wanted: Wanted) -> list[Finding]:
    """The run folder is the same on all nodes, the data is there, and something is free."""
    found = []
    for node, fact in facts.items():
        place = fact["paths"][wanted.run_dir]
        if not place["writable"]:
            found.append(Finding("run.dir", node, "fail", f"{wanted.run_dir} cannot be written", "correct its owner"))
        elif fact["token"] is False:
            message = f"{wanted.run_dir} is not the folder that this machine sees: it is not shared storage"
            remedy = "set run.dir to a folder on storage that all nodes and this machine share (--set run.dir=PATH)"
            found.append(Finding("run.dir", node, "fail", message, remedy))
        elif place["free_bytes"] < LEAST_FREE_BYTES:
            message = f"{place['free_bytes'] / 2**20:.0f} MiB are free for {wanted.run_dir}"
            found.append(Finding("disk", node, "warn", message, "free space before the first checkpoint"))
        else:
            found.append(Finding("run.dir", node, "ok", f"{place['free_bytes'] / 2**30:.0f} GiB free"))
        for path in wanted.data_paths:
            if not fact["paths"][path]["exists"]:
                remedy = "put the dataset on shared storage, or copy it"
                found.append(Finding("data.path", node, "fail", f"{path} is not there", remedy))
    return found


def drained(facts: Mapping[str, Facts], wanted: Wanted) -> list[Finding]:
    """No node has the drain mark: an upgrade is under way there, or a person keeps it free."""
    remedy = f"once it may train again, remove {DRAIN_MARK} there; or leave it out, or name --spares"
    return [
        Finding("drained", node, "fail", f"it is drained: {fact['drained']}", remedy)
        for node, fact in facts.items()
        if fact["drained"] is not None
    ]


def node_folder(facts: Mapping[str, Facts], wanted: Wanted) -> list[Finding]:
    """The node's own disk takes the checkout, logs and state of a run."""
    found = []
    for node, fact in facts.items():
        place = fact["node_folder"]
        if not place["writable"]:
            message = f"{NODE_FOLDER} cannot be written"
            found.append(Finding("node folder", node, "fail", message, "correct its owner there"))
        elif place["free_bytes"] < LEAST_NODE_BYTES:
            message = f"{place['free_bytes'] / 2**20:.0f} MiB are free for {NODE_FOLDER}"
            remedy = f"free {LEAST_NODE_BYTES // 2**20} MiB there: code, logs and state of the run need it"
            found.append(Finding("node folder", node, "fail", message, remedy))
    return found


def cuda_versions(facts: Mapping[str, Facts], wanted: Wanted) -> list[Finding]:
    """Nodes with GPUs have the same NCCL and the same CUDA in torch, and a driver that is new enough for it."""
    with_gpus = {node: fact for node, fact in facts.items() if fact["machine"]["gpus"]}
    found = []
    for name, title in (("nccl", "NCCL"), ("cuda", "CUDA of torch")):
        versions = {node: fact["versions"].get(name) or "none" for node, fact in with_gpus.items()}
        usual = Counter(versions.values()).most_common(1)[0][0] if versions else ""
        for node, version in versions.items():
            if version == usual:
                found.append(Finding(name, node, "ok", version))
            else:
                remedy = f"install the torch there that the others have ({title} {usual})"
                found.append(Finding(name, node, "fail", f"{title} {version}, the others have {usual}", remedy))
    return found


def limits(facts: Mapping[str, Facts], wanted: Wanted) -> list[Finding]:
    """Locked memory (RDMA), open files and shared memory are not too small."""
    found = []
    for node, fact in facts.items():
        memlock, nofile = fact["limits"]["memlock"], fact["limits"]["nofile"]
        if fact["infiniband"] and memlock != -1:
            message = f"memlock is {memlock // 1024} KiB, RDMA needs unlimited"
            found.append(Finding("memlock", node, "fail", message, "set memlock unlimited in limits.d"))
        if nofile != -1 and nofile < LEAST_NOFILE:
            found.append(Finding("nofile", node, "warn", f"only {nofile} open files", "raise nofile in limits.d"))
        if fact["shm_bytes"] < LEAST_SHM_BYTES:
            message = f"/dev/shm has {fact['shm_bytes'] / 2**20:.0f} MiB free"
            found.append(Finding("shm", node, "warn", message, "enlarge /dev/shm: NCCL and the data workers use it"))
    return found


def gpus(facts: Mapping[str, Facts], wanted: Wanted) -> list[Finding]:
    """Every node has the same GPUs."""
    shapes = {node: _gpu_shape(fact) for node, fact in facts.items()}
    usual = Counter(shapes.values()).most_common(1)[0][0]
    return [
        Finding("gpus", node, "ok", shape)
        if shape == usual
        else Finding("gpus", node, "fail", f"{shape}, the others have {usual}", "see nvidia-smi there, or leave it out")
        for node, shape in shapes.items()
    ]


def master_port(facts: Mapping[str, Facts], wanted: Wanted) -> list[Finding]:
    """The port that was asked for is free on the first node."""
    if wanted.port is None:
        return []
    first = next(iter(facts))
    if facts[first]["port_free"]:
        return [Finding("port", first, "ok", f"{wanted.port} is free")]
    message = f"port {wanted.port} is taken"
    return [Finding("port", first, "fail", message, "choose another --port, or leave it out: a free one is taken")]


def drivers(facts: Mapping[str, Facts], wanted: Wanted) -> list[Finding]:
    """Driver, memory errors, Xid reports, NVLink and fabric manager of nodes with GPUs."""
    found = []
    versions = {node: fact["driver"] for node, fact in facts.items() if fact["machine"]["gpus"]}
    usual = Counter(versions.values()).most_common(1)[0][0] if versions else ""
    for node, version in versions.items():
        fact = facts[node]
        same = version == usual
        found.append(
            Finding("driver", node, "ok" if same else "fail", version or "none", "" if same else f"install {usual}")
        )
        offered, needed = fact["driver_cuda"], fact["versions"].get("cuda") or ""
        # Within a major version newer CUDA runs on older drivers (minor version compatibility).
        if offered and needed and _major(offered) < _major(needed):
            message = f"the driver offers CUDA {offered}, torch was built for {needed}"
            found.append(Finding("cuda", node, "fail", message, "install a newer driver there, or an older torch"))
        if fact["ecc_errors"]:
            message = f"{fact['ecc_errors']} uncorrected memory errors"
            found.append(Finding("ecc", node, "fail", message, "reset the GPU or replace the node"))
        if fact["xid"]:
            found.append(Finding("xid", node, "warn", fact["xid"][-1], "see dmesg there"))
        if "inactive" in fact["nvlink"].lower():
            found.append(Finding("nvlink", node, "fail", "a link is inactive", "see nvidia-smi nvlink --status"))
        if fact["nvlink"] and fact["fabric_manager"].strip() == "failed":
            found.append(
                Finding("fabric manager", node, "fail", "it has failed", "systemctl restart nvidia-fabricmanager")
            )
    return found


def rdma(facts: Mapping[str, Facts], wanted: Wanted) -> list[Finding]:
    """RDMA ports are up, and every node has as many as the others."""
    counts = {node: len(fact["infiniband"]) for node, fact in facts.items()}
    usual = Counter(counts.values()).most_common(1)[0][0]
    found = []
    for node, fact in facts.items():
        down = [port for port in fact["infiniband"] if "ACTIVE" not in port["state"]]
        for port in down:
            message = f"{port['device']} port {port['port']} is {port['state'] or 'down'}"
            found.append(Finding("rdma", node, "fail", message, "see ibstat or the EFA driver there"))
        if counts[node] != usual:
            message = f"{counts[node]} ports, the others have {usual}"
            found.append(Finding("rdma", node, "fail", message, "see /sys/class/infiniband there"))
    return found


QUICK: tuple[Check, ...] = (
    *(drained, same_versions, cuda_versions, clocks),
    *(paths, node_folder, limits, gpus, master_port),
)
DEEP: tuple[Check, ...] = (drivers, rdma)


def judge(answers: Mapping[str, Facts | HostError], wanted: Wanted, deep: bool = False) -> list[Finding]:
    """Returns everything that the checks find; nodes that do not answer are findings too."""
    facts = {node: answer for node, answer in answers.items() if not isinstance(answer, HostError)}
    found = reachable(answers)
    for check in (*QUICK, *(DEEP if deep else ())):
        found += check(facts, wanted) if facts else []
    return found


def failed(findings: Iterable[Finding]) -> bool:
    """True when a finding forbids the run."""
    return any(finding.level == "fail" for finding in findings)


def _short(name: str, version: str) -> str:
    return ".".join(version.split(".")[:2]) if name == "python" else version


def _major(version: str) -> int:
    return int(version.split(".", maxsplit=1)[0])


def _gpu_shape(fact: Facts) -> str:
    names = Counter(gpu["name"] for gpu in fact["machine"]["gpus"])
    return ", ".join(f"{count} x {name}" for name, count in sorted(names.items())) or "no GPU"
