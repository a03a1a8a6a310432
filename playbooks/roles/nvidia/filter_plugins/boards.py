"""What the GPUs of a node need of the driver, by their numbers on PCI, and what cannot work on them."""

from __future__ import annotations

from typing import Any

BRANCHES = ("580", "595", "620")
OLDEST_BRANCH = 580
# The last branch with modules for what came before Turing.
LAST_BRANCH_BEFORE_TURING = 580
# PCI device numbers by architecture: Turing, Ampere (GA100, then GA10x), Hopper, Ada, Blackwell.
FIRST_TURING, FIRST_HOPPER, FIRST_GA10X, FIRST_ADA, FIRST_BLACKWELL = 0x1E00, 0x2300, 0x2400, 0x2600, 0x2900
# Blackwell on boards whose NVLink switches have no PCI class of their own (GB100 and its successors).
NVLINK5_DEVICES = (range(0x2900, 0x2A00), range(0x3180, 0x3200))


def nvidia_board(facts: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Returns what the GPUs of a node need.

    `modules` is open or proprietary; `fabric_manager` says whether CUDA needs it; `nvlink5` that it needs nvlsm and the
    module ib_umad too; `proprietary_profiling` that DCGM needs that part for its metrics.
    """
    return {
        "modules": modules_of(facts, settings["modules"]),
        "fabric_manager": needs_fabric_manager(facts, settings["fabric_manager"]),
        "nvlink5": has_nvlink5(facts),
        "proprietary_profiling": any(is_ampere_or_older(device) for device in devices(facts)),
    }


def devices(facts: dict[str, Any]) -> list[int]:
    """Returns the PCI device numbers of the GPUs."""
    return [int(gpu["device"], 16) for gpu in facts["gpus"]]


def modules_of(facts: dict[str, Any], wanted: str) -> str:
    """Returns `open` or `proprietary`."""
    if wanted != "auto":
        return wanted
    return "open" if facts["open_modules"] else "proprietary"


def needs_fabric_manager(facts: dict[str, Any], wanted: str) -> bool:
    """True where CUDA does not begin without Fabric Manager."""
    if wanted != "auto":
        return wanted == "always"
    return facts["nvswitch_count"] > 0 or has_nvlink5(facts)


def has_nvlink5(facts: dict[str, Any]) -> bool:
    """True for Blackwell boards with NVLink: their Fabric Manager also needs nvlsm and the module ib_umad."""
    return any(device in numbers for device in devices(facts) for numbers in NVLINK5_DEVICES)


def is_ampere_or_older(device: int) -> bool:
    """True where DCGM's profiling needs its proprietary part."""
    return device < FIRST_HOPPER or FIRST_GA10X <= device < FIRST_ADA


def nvidia_faults(facts: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Returns what cannot work on this node, before anything is touched: one line each with cause and remedy."""
    branch, modules = str(settings["branch"]), modules_of(facts, settings["modules"])
    faults = _branch_faults(branch, str(settings["version"]))
    if faults:
        return faults
    old = [device for device in devices(facts) if device < FIRST_TURING]
    new = [device for device in devices(facts) if device >= FIRST_BLACKWELL]
    if old and int(branch) > LAST_BRANCH_BEFORE_TURING:
        faults.append(
            f"nvidia_driver_branch: {branch} has no modules for GPU {old[0]:#06x} (older than Turing). "
            f"Set {LAST_BRANCH_BEFORE_TURING} for this host"
        )
    if old and modules == "open":
        faults.append(f"nvidia_modules: open modules do not serve GPU {old[0]:#06x} (older than Turing). Leave auto")
    if new and modules == "proprietary":
        faults.append(f"nvidia_modules: GPU {new[0]:#06x} (Blackwell or newer) has open modules only. Leave auto")
    return faults + _world_faults(facts, settings)


def _branch_faults(branch: str, version: str) -> list[str]:
    if branch not in BRANCHES:
        old = branch.isdigit() and int(branch) < OLDEST_BRANCH
        cause = "no longer gets updates" if old else "is not a branch that this version knows"
        return [f"nvidia_driver_branch: {branch} {cause}. Take one of {', '.join(BRANCHES)}"]
    if version and not version.startswith(f"{branch}."):
        return [
            f"nvidia_version: {version} is not of branch {branch}. "
            f"Set nvidia_driver_branch to {version.split('.', maxsplit=1)[0]} too, or take another version"
        ]
    return []


def _world_faults(facts: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    if settings["world"] == "ubuntu-archive" and settings["distribution"] != "Ubuntu":
        return [f"nvidia_world: ubuntu-archive is for Ubuntu, and this is {settings['distribution']}. Take nvidia"]
    if settings["world"] == "nvidia" and facts["secure_boot"] and not settings["own_signing_key"]:
        answer = "Set nvidia_world: ubuntu-archive (signed modules)" if settings["distribution"] == "Ubuntu" else ""
        answer = answer or "Turn secure boot off in the firmware"
        return [
            "nvidia_world: secure boot is on, and modules that are built here would not load. "
            f"{answer}, or enrol a key for DKMS and set nvidia_own_signing_key: true"
        ]
    return []


class FilterModule:
    """What Ansible looks for in this file."""

    def filters(self) -> dict[str, Any]:
        """Names of the filters."""
        return {"nvidia_board": nvidia_board, "nvidia_faults": nvidia_faults}
