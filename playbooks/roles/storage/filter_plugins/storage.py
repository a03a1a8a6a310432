"""What a host has to do for shared storage and scratch, decided from the inventory, its facts and what lsblk says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError

LUSTRE_KINDS = ("fsx-lustre", "lustre")
SCRATCH_LABEL = "lw-scratch"
EXPORT_LABEL = "lw-export"
# Each serves one kernel; those without a number are metapackages and sources.
LUSTRE_CLIENT = re.compile(r"lustre-client-modules-(?P<kernel>\d.*)$")
NEWEST = 3
PLAIN_PATH = re.compile(r"/[A-Za-z0-9_.@-]+(/[A-Za-z0-9_.@-]+)*$")


def mount_unit(path: str, suffix: str = "mount") -> str:
    """Name of the systemd unit that mounts `path`, as systemd-escape --path gives it."""
    if not PLAIN_PATH.match(path):
        raise AnsibleFilterError(
            f"storage: {path!r} cannot be a mount point. Take an absolute path of letters, digits and _ . - @"
        )
    text = path.strip("/")
    first = "\\x2e" if text.startswith(".") else ""
    escaped = re.sub(r"[-@]", lambda sign: f"\\x{ord(sign.group()):02x}", text[1:] if first else text)
    return f"{first}{escaped.replace('/', '-')}.{suffix}"


def storage_plan(
    storage: Mapping[str, Any],
    host: str,
    groups: Mapping[str, Sequence[str]],
    hostvars: Any,
    facts: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns what `host` does for the shared storage.

    `storage` is loopworks_storage, `facts` are ansible_facts['loopworks'], `settings` holds export, options (by kind:
    nfs, efs, lustre) and head. The result: server (inventory name, empty where the storage is not of this inventory),
    serves, export, what, type, options, mount_point, unit, mounts, folders_in (empty where another host makes the
    folders), packages, and skip (why nothing is mounted, empty where all is well).
    """
    kind, mount_point = storage["kind"], storage.get("mount_point") or ""
    server, export = _server(storage, groups, hostvars, settings)
    serves = server == host and bool(server)
    options = {"fsx-lustre": settings["options"]["lustre"], **settings["options"]}.get(kind, "")
    plan = {
        "kind": kind,
        "server": server,
        "serves": serves,
        "export": export,
        "mount_point": mount_point,
        "what": export if serves else storage.get("source") or f"{_address(server, hostvars)}:{export}",
        "type": "none" if serves else storage.get("fstype") or ("lustre" if kind in LUSTRE_KINDS else "nfs4"),
        "options": "bind" if serves else storage.get("options") or options,
        "unit": mount_unit(mount_point) if mount_point else "",
        "skip": _skip(kind, mount_point, facts),
    }
    plan["mounts"] = kind != "none" and not plan["skip"] and (not serves or export != mount_point)
    keeper = host == (server or settings["head"])
    if kind == "none":
        plan["folders_in"] = mount_point
    else:
        plan["folders_in"] = (export if serves else mount_point) if keeper and not plan["skip"] else ""
    plan["packages"] = _packages(plan, facts)
    return plan


def _server(
    storage: Mapping[str, Any], groups: Mapping[str, Sequence[str]], hostvars: Any, settings: Mapping[str, Any]
) -> tuple[str, str]:
    """Inventory name of the NFS server and the exported path; an empty name where it is not of this inventory."""
    if storage["kind"] != "nfs":
        return "", ""
    candidates = [*groups.get("storage", []), settings["head"]]
    source = storage.get("source") or ""
    if not source:
        return candidates[0], settings["export"]
    address, _, path = source.partition(":")
    ours = [name for name in candidates if name and address in (name, _address(name, hostvars))]
    return (ours[0] if ours else ""), path


def _address(host: str, hostvars: Any) -> str:
    """The address by which the others know a host."""
    if not host:
        return ""
    known = hostvars[host]
    facts = known.get("ansible_facts") or {}
    found = known.get("loopworks_private_ip") or (facts.get("default_ipv4") or {}).get("address")
    return str(found or known.get("ansible_host") or host)


def _skip(kind: str, mount_point: str, facts: Mapping[str, Any]) -> str:
    """Why nothing can be mounted here. For Lustre the module is looked for after its package has been tried."""
    if kind == "none":
        return "" if mount_point else "no shared storage (loopworks_storage.kind is none, without mount_point)"
    if facts.get("container"):
        return f"{mount_point}: a container cannot mount {kind}"
    if kind in ("nfs", "efs") and not facts.get("nfs_module"):
        return f"{mount_point}: the running kernel has no NFS module"
    return ""


def _packages(plan: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    if plan["skip"] or plan["kind"] == "none":
        return []
    if plan["serves"]:
        return ["nfs-kernel-server"]
    if plan["type"] == "nfs4":
        return ["nfs-common"]
    return [] if facts.get("lustre_module") else ["python3-debian"]  # for deb822_repository


def lustre_client(names: Sequence[str], kernel: str) -> dict[str, Any]:
    """Returns the package of the running kernel among the names on offer, and the newest kernels that have one.

    The result: package (empty where there is none) and kernels (three at most, newest first).
    """
    served = [match["kernel"] for match in map(LUSTRE_CLIENT.match, names) if match]
    newest = sorted(served, key=lambda name: [int(part) for part in re.findall(r"\d+", name)], reverse=True)
    return {"package": f"lustre-client-modules-{kernel}" if kernel in served else "", "kernels": newest[:NEWEST]}


def lustre_unheld(lines: Sequence[str]) -> list[str]:
    """Installed packages that are not held yet, of `dpkg-query --showformat '${db:Status-Abbrev} ${Package}\\n'`."""
    found = [line.split() for line in lines]
    return [name for state, name in found if state[1:2] == "i" and state[0] != "h"]


def data_disk(lsblk: Mapping[str, Any], device: str, volume_id: str = "") -> dict[str, str]:
    """Returns the disk for the export: device, action (use, format, refuse) and why.

    `device` may be a name that the cloud gave and the kernel did not take (/dev/sdf): then the disk whose serial number
    is the volume's id is meant, and without an id the only disk of the cloud's volume type that carries nothing.
    """
    disks = [disk for disk in lsblk["blockdevices"] if disk["type"] in ("disk", "loop", "raid0")]
    found = [disk for disk in disks if disk["path"] == device]
    serial = volume_id.replace("-", "")
    if not found and serial:
        found = [disk for disk in disks if (disk.get("serial") or "") == serial]
    if not found and not serial:
        found = [d for d in disks if "Elastic Block Store" in (d.get("model") or "") and not _carries(d)]
    if len(found) != 1:
        names = ", ".join(disk["path"] for disk in disks)
        return {"device": "", "action": "refuse", "why": f"{device}: no such disk. This host has {names}"}
    carries = _carries(found[0])
    if not carries:
        return {"device": found[0]["path"], "action": "format", "why": ""}
    if found[0].get("label") == EXPORT_LABEL:
        return {"device": found[0]["path"], "action": "use", "why": ""}
    return {"device": found[0]["path"], "action": "refuse", "why": f"{found[0]['path']} carries {carries}"}


def scratch_plan(lsblk: Mapping[str, Any], wanted: Sequence[str]) -> dict[str, Any]:
    """Returns what to do with the disks for scratch: devices and action (use, format, raid, skip) with why.

    A disk that carries anything is never touched: one such disk and nothing is done at all.
    """
    disks = {disk["path"]: disk for disk in lsblk["blockdevices"]}
    devices = [disks[name] for name in wanted if name in disks]
    if not devices:
        return {"devices": [], "action": "skip", "why": "no local disks for scratch"}
    if any(SCRATCH_LABEL in _labels(disk) for disk in devices):
        return {"devices": list(wanted), "action": "use", "why": ""}
    taken = [f"{disk['path']} carries {_carries(disk)}" for disk in devices if _carries(disk)]
    if taken:
        return {"devices": [], "action": "skip", "why": f"{'; '.join(taken)}: such a disk is never formatted"}
    action = "raid" if len(devices) > 1 else "format"
    return {"devices": [disk["path"] for disk in devices], "action": action, "why": ""}


def _carries(disk: Mapping[str, Any]) -> str:
    """What is on a disk: a file system, a partition table, parts or a mount; empty where nothing is."""
    for key, text in (("fstype", ""), ("pttype", "a partition table "), ("mountpoint", "a mount at ")):
        if disk.get(key):
            return f"{text}{disk[key]}"
    return "other devices" if disk.get("children") else ""


def _labels(disk: Mapping[str, Any]) -> set[str]:
    found = {disk.get("label") or ""}
    for part in disk.get("children") or []:
        found |= _labels(part)
    return found


class FilterModule:
    """What Ansible looks for in this file."""

    def filters(self) -> dict[str, Any]:
        """Names of the filters."""
        return {
            "storage_mount_unit": mount_unit,
            "storage_plan": storage_plan,
            "storage_data_disk": data_disk,
            "storage_scratch_plan": scratch_plan,
            "storage_lustre_client": lustre_client,
            "storage_lustre_unheld": lustre_unheld,
        }
