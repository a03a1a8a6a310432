#!/usr/bin/python
"""What the package system and systemd know of the NVIDIA driver. Reads only."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: nvidia_state
short_description: Packages, holds and units of the NVIDIA driver
description:
  - Returns what is on offer, installed and held, how the units stand, and the drain mark.
  - Changes nothing.
options:
  kernel:
    description: Release of the running kernel; packages for it are looked for.
    type: str
    required: true
author: Loopworks
"""

EXAMPLES = r"""
- name: Packages and units
  nvidia_state:
    kernel: "{{ ansible_facts['kernel'] }}"
"""

RETURN = r"""
state:
  description: The keys offers, installed, held, units, persistenced_exec and drained.
  type: dict
  returned: always
"""

UNITS = (
    "dcgm-exporter",
    "nvidia-dcgm-exporter",  # the unit of the role monitoring
    "prometheus-dcgm-exporter",
    "nvidia-dcgm",
    "nvidia-fabricmanager",
    "nvidia-persistenced",
)
# All that a driver consists of, whatever a branch calls it, and the kernels that it is built for.
FAMILY = re.compile(
    r"(lib)?nvidia-|nvidia$|nvlsm$|cuda-drivers|cuda-keyring$|libcuda1|libcudadebugger|firmware-nvidia-|libxnvctrl"
    r"|xserver-xorg-video-nvidia|datacenter-gpu-manager|linux-"
)
# Those of them whose versions on offer decide something before anything is installed.
ASKED = re.compile(
    r"(nvidia-open|cuda-drivers)(-\d+)?$|nvidia-fabricmanager(-\d+)?$|nvidia-driver-pinning-[\d.]+$|nvlsm$"
    r"|nvidia-headless-no-dkms-\d+-server(-open)?$|nvidia-utils-\d+-server$|datacenter-gpu-manager-4-"
)
DRAIN_MARK = "/var/lib/loopworks/drained"


def output(module, *command):
    """Standard output of a command; empty where it is not installed or has nothing to say."""
    if shutil.which(command[0]) is None:
        return ""
    return module.run_command(list(command), environ_update={"LC_ALL": "C"})[1]


def installed(text):
    """Name to version, of the family's packages, from lines `STATUS NAME VERSION`."""
    rows = [line.split() for line in text.splitlines()]
    return {
        row[1].split(":")[0]: row[2] for row in rows if len(row) == 3 and row[0][1:2] == "i" and FAMILY.match(row[1])
    }


def offers(text):
    """Name to versions, newest first, from what `apt-cache madison` prints."""
    found = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) == 3 and fields[1] not in found.setdefault(fields[0], []):
            found[fields[0]].append(fields[1])
    return found


def units(text):
    """Unit to its state and the file that it comes from, of those that exist."""
    found = {}
    for block in text.split("\n\n"):
        values = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if values.get("LoadState") == "loaded":
            name = values["Id"].rsplit(".", 1)[0]
            found[name] = {
                "active": values["ActiveState"] == "active",
                "enabled": values["UnitFileState"] == "enabled",
                "path": values["FragmentPath"],
            }
    return found


def exec_start(path):
    """The command of a unit file."""
    try:
        text = Path(path).read_text(errors="replace")
    except OSError:
        return ""
    lines = [line[len("ExecStart=") :].strip() for line in text.splitlines() if line.startswith("ExecStart=")]
    return lines[-1] if lines else ""


def drained():
    """Text of the drain mark; empty where there is none."""
    try:
        return Path(DRAIN_MARK).read_text(errors="replace").strip() or "no reason is given"
    except OSError:
        return ""


def collect(module):
    """The whole state."""
    kernel = module.params["kernel"]
    have = installed(output(module, "dpkg-query", "-W", "-f", "${db:Status-Abbrev} ${Package} ${Version}\n"))
    headers = f"linux-headers-{kernel}"
    known = output(module, "apt-cache", "pkgnames").split()
    flavour = kernel.rsplit("-", 1)[-1]
    modules = re.compile(rf"linux-modules-nvidia-\d+-server(-open)?-({re.escape(kernel)}|{re.escape(flavour)})$")
    asked = sorted({name for name in known if ASKED.match(name) or modules.match(name) or name in have} | {headers})
    show = ("Id", "LoadState", "ActiveState", "UnitFileState", "FragmentPath")
    state = units(output(module, "systemctl", "show", "-p", ",".join(show), *(f"{unit}.service" for unit in UNITS)))
    return {
        "offers": offers(output(module, "apt-cache", "madison", *asked)),
        "installed": {**have, **({headers: "installed"} if Path("/lib/modules", kernel, "build").exists() else {})},
        "held": output(module, "apt-mark", "showhold").split(),
        "units": state,
        "persistenced_exec": exec_start(state.get("nvidia-persistenced", {}).get("path", "")),
        "drained": drained(),
    }


def main():
    """Entry of the module."""
    module = AnsibleModule({"kernel": {"type": "str", "required": True}}, supports_check_mode=True)
    module.exit_json(changed=False, state=collect(module))


if __name__ == "__main__":
    main()
