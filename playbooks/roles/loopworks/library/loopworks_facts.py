#!/usr/bin/python
"""Facts of a node that Ansible's setup does not tell: GPUs, NVSwitches, fabric, modules, runs. Reads only."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: loopworks_facts
short_description: Facts of accelerators, fabric and storage
description:
  - Returns C(ansible_facts.loopworks). Changes nothing, also outside check mode.
options:
  root:
    description: Folder in which sys and proc are looked for.
    type: path
    default: /
author: Loopworks
"""

EXAMPLES = r"""
- name: Facts of accelerators, fabric and storage
  loopworks_facts:
"""

RETURN = r"""
ansible_facts:
  description: The key loopworks with gpu_count, gpus, nvswitch_count, infiniband, runs, reboot_due and so on.
  type: dict
  returned: always
"""

NVIDIA, MELLANOX, AMAZON = "0x10de", "0x15b3", "0x1d0f"
# PCI classes: 3D or VGA controller, bridge (NVSwitch), InfiniBand or Ethernet controller.
GPU_CLASSES, NVSWITCH_CLASS, NETWORK_CLASSES = ("0x0300", "0x0302"), "0x0680", ("0x0207", "0x0200")
EFA_DEVICES = re.compile(r"0xefa[0-9a-f]$")
# Open kernel modules serve Turing and later. Device numbers follow the order of architectures; Turing begins here.
FIRST_TURING_DEVICE = 0x1E00
# Processes of a run, whoever started it.
RUN_VARIABLES = ("LOOPWORKS_RUN=", "SLURM_JOB_ID=")
# Every role that needs a reboot writes a line into it. Below /run, so that the reboot takes it away.
REBOOT_FLAG = "/run/loopworks-reboot"
SECURE_BOOT = "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
DEADLINE_S = 20


def read(*parts):
    """Text of a file without its end of line; empty where there is none."""
    try:
        return Path(*parts).read_text(errors="replace").strip()
    except OSError:
        return ""


def names(*parts):
    """Names in a folder, sorted; none where there is none."""
    try:
        return sorted(path.name for path in Path(*parts).iterdir())
    except OSError:
        return []


def pci_devices(root):
    """Address, vendor, device and class of every PCI device."""
    base = Path(root, "sys/bus/pci/devices")
    return [
        {"address": address, **{key: read(base, address, key) for key in ("vendor", "device", "class")}}
        for address in names(base)
    ]


def accelerators(devices):
    """GPUs and NVSwitches, told by PCI class and not by name."""
    gpus = [d for d in devices if d["vendor"] == NVIDIA and d["class"].startswith(GPU_CLASSES)]
    switches = [d for d in devices if d["vendor"] == NVIDIA and d["class"].startswith(NVSWITCH_CLASS)]
    return {
        "gpus": [{"address": d["address"], "device": d["device"]} for d in gpus],
        "gpu_count": len(gpus),
        "nvswitch_count": len(switches),
        "open_modules": bool(gpus) and all(int(d["device"], 16) >= FIRST_TURING_DEVICE for d in gpus),
    }


def fabric(root, devices):
    """InfiniBand and EFA: what is on PCI, and what has a driver."""
    return {
        "infiniband": names(root, "sys/class/infiniband"),
        "mellanox_count": len(
            [d for d in devices if d["vendor"] == MELLANOX and d["class"].startswith(NETWORK_CLASSES)]
        ),
        "efa_count": len([d for d in devices if d["vendor"] == AMAZON and EFA_DEVICES.match(d["device"])]),
    }


def kernel(root):
    """Loaded modules that matter, and file systems the kernel can mount now."""
    loaded = names(root, "sys/module")
    systems = [line.split()[-1] for line in read(root, "proc/filesystems").splitlines() if line.strip()]
    # The last byte says whether it is on; before it are four bytes of attributes.
    variable = Path(root, "sys/firmware/efi/efivars", SECURE_BOOT)
    secure = variable.exists() and variable.read_bytes()[-1:] == b"\x01"
    return {
        "nouveau_loaded": "nouveau" in loaded,
        "nvidia_module_version": read(root, "sys/module/nvidia/version"),
        "file_systems": systems,
        "secure_boot": secure,
        "is_ec2": read(root, "sys/class/dmi/id/sys_vendor") == "Amazon EC2",
    }


def module_available(name):
    """True when the running kernel has the module, loaded or not."""
    modinfo = shutil.which("modinfo") or shutil.which("modinfo", path="/sbin:/usr/sbin")
    if modinfo is None:
        return False
    return subprocess.run([modinfo, name], capture_output=True, timeout=DEADLINE_S, check=False).returncode == 0


def instance_store(root):
    """NVMe disks of the instance itself (AWS names them so)."""
    base = Path(root, "sys/block")
    return [
        "/dev/" + name
        for name in names(base)
        if name.startswith("nvme") and "Instance Storage" in read(base, name, "device/model")
    ]


def drained(root):
    """Why the node is drained; empty where it is not."""
    text = read(root, "var/lib/loopworks/drained")
    try:
        return str(json.loads(text).get("reason", text))
    except (ValueError, AttributeError):
        return text


def runs(proc="/proc"):
    """Runs and jobs that have a process here, sorted."""
    found = set()
    for path in Path(proc).glob("[0-9]*/environ"):
        words = read(path).split("\0")  # empty where the process is gone meanwhile
        found.update(word for word in words if word.startswith(RUN_VARIABLES) and word[-1:] != "=")
    return sorted(found)


def nvidia_smi():
    """Driver version by NVML and the number of GPUs that it sees; empty and 0 where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {"nvml_version": "", "nvml_gpu_count": 0}
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        return {"nvml_version": "no answer", "nvml_gpu_count": 0}
    lines = done.stdout.split() if done.returncode == 0 else []
    return {"nvml_version": lines[0] if lines else "", "nvml_gpu_count": len(lines)}


def collect(root):
    """All facts."""
    devices = pci_devices(root)
    return {
        **accelerators(devices),
        **fabric(root, devices),
        **kernel(root),
        **nvidia_smi(),
        "instance_store": instance_store(root),
        "lustre_module": module_available("lustre"),
        "nfs_module": module_available("nfsv4"),
        "container": bool(read("/run/systemd/container")),
        "drained": drained(root),
        "runs": runs(),
        "reboot_due": read(REBOOT_FLAG).splitlines(),
    }


def main():
    """Entry of the module."""
    module = AnsibleModule({"root": {"type": "path", "default": "/"}}, supports_check_mode=True)
    module.exit_json(changed=False, ansible_facts={"loopworks": collect(module.params["root"])})


if __name__ == "__main__":
    main()
