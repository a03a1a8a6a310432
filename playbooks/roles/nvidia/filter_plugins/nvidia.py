"""Decisions about the NVIDIA driver of a node: from lists of packages to what is installed, and verdicts."""

from __future__ import annotations

import re
from typing import Any

DRIVER_VERSION = re.compile(r"(?:\d+:)?(\d{3}\.\d+(?:\.\d+)*)(?:-|$)")
WORLDS = {"nvidia": re.compile(r"(nvidia-open|cuda-drivers)(-\d+)?$"), "ubuntu-archive": re.compile(r".*-\d+-server")}
# Tools that Ubuntu keeps at versions of their own.
OWN_PACE = ("nvidia-settings", "nvidia-modprobe", "libxnvctrl0")
PINS = ("linux-modules-nvidia-", "nvidia-driver-pinning-")
# Exporters first, the daemon that keeps the module loaded last.
STOP_ORDER = (
    "nvidia-dcgm-exporter",
    "dcgm-exporter",
    "prometheus-dcgm-exporter",
    "nvidia-dcgm",
    "nvidia-fabricmanager",
    "nvidia-persistenced",
)


def upstream(version: str) -> str:
    """Returns the driver's own version in that of a package (`580.126.09` of `580.126.09-1`); empty for others."""
    found = DRIVER_VERSION.match(version)
    return found[1] if found else ""


def driver_parts(installed: dict[str, str]) -> dict[str, str]:
    """Returns the installed packages that have to have the driver's version, each with that version."""
    versions = {name: upstream(version) for name, version in installed.items() if name not in OWN_PACE}
    return {name: version for name, version in versions.items() if version}


def nvidia_plan(
    state: dict[str, Any], facts: dict[str, Any], board: dict[str, Any], settings: dict[str, Any]
) -> dict[str, Any]:
    """Returns what is to be installed; `board` is what nvidia_board says of the GPUs.

    `faults` has what stops it; `version` is the driver's, `requests` what apt is asked for in one transaction (empty
    when all is there), `moves` says whether that takes a driver away that may be in use, `release` the holds to take
    off before, `stale` packages that pin another version, `services` the units to run. `is_known` is False while the
    repository is not on the node yet (check mode on a bare host).
    """
    return _Plan(state, facts, board, settings).result()


class _Plan:
    """The plan while it is made: what several of its parts look at."""

    def __init__(
        self, state: dict[str, Any], facts: dict[str, Any], board: dict[str, Any], settings: dict[str, Any]
    ) -> None:
        self.state, self.facts, self.board, self.settings = state, facts, board, settings
        self.offers: dict[str, list[str]] = state["offers"]
        self.installed: dict[str, str] = state["installed"]
        self.branch, self.kernel = str(settings["branch"]), str(settings["kernel"])
        self.modules: str = board["modules"]
        self.fabric_manager: bool = board["fabric_manager"]
        self.is_archive = settings["world"] == "ubuntu-archive"

    def result(self) -> dict[str, Any]:
        # In check mode a bare host has no repository yet.
        is_known = bool(self.branches()) or self.leader in self.installed or not self.settings["check_mode"]
        version = self.version()
        faults = self.faults(version) if is_known else []
        requests = self.requests(version) if is_known and not faults else []
        pinning = f"nvidia-driver-pinning-{version}"
        return {
            "is_known": is_known,
            "faults": faults,
            "branch": self.branch,
            "version": version,
            "modules": self.modules,
            "fabric_manager": self.fabric_manager,
            "nvlink5": self.board["nvlink5"],
            "requests": requests,
            "moves": bool(requests) and any(have != version for have in driver_parts(self.installed).values()),
            "release": sorted(set(self.state["held"]) & set(held_parts(self.installed))) if requests else [],
            "stale": sorted(
                name for name in self.installed if name.startswith("nvidia-driver-pinning-") and name != pinning
            ),
            "services": self.services(),
        }

    @property
    def leader(self) -> str:
        """The package whose versions are those of the driver."""
        if self.is_archive:
            return f"nvidia-headless-no-dkms-{self.branch}-server{self.suffix}"
        return "nvidia-open" if self.modules == "open" else "cuda-drivers"

    @property
    def suffix(self) -> str:
        return "-open" if self.modules == "open" else ""

    def packages(self) -> list[str]:
        """What has to have the driver's version."""
        names = [self.leader]
        if self.is_archive:
            names.append(f"nvidia-utils-{self.branch}-server")
        if self.fabric_manager:
            # Suffixed in Ubuntu's archive; in NVIDIA's repository the suffixed name is only virtual from 580 on.
            names.append(f"nvidia-fabricmanager-{self.branch}" if self.is_archive else "nvidia-fabricmanager")
        return names

    def version(self) -> str:
        """The one asked for; else, outside an upgrade, the one that is there; else the newest of the branch."""
        if self.settings["version"]:
            return str(self.settings["version"])
        present = upstream(self.installed.get(self.leader, ""))
        if present.startswith(f"{self.branch}.") and not self.settings["upgrade"]:
            return present
        return next((upstream(offer) for offer in self.offers_of_branch()), "")

    def offers_of_branch(self) -> list[str]:
        # A package named after a branch can be an empty one that leads to a newer branch: versions decide.
        return [offer for offer in self.offers.get(self.leader, []) if upstream(offer).startswith(f"{self.branch}.")]

    def branches(self) -> dict[str, list[str]]:
        """Branches on offer, each with its versions, newest first."""
        if self.is_archive:
            pattern = re.compile(rf"nvidia-headless-no-dkms-\d+-server{self.suffix}$")
            leaders = [name for name in self.offers if pattern.match(name)]
        else:
            leaders = [self.leader]
        found: dict[str, list[str]] = {}
        for version in filter(None, (upstream(offer) for name in leaders for offer in self.offers.get(name, []))):
            versions = found.setdefault(version.split(".")[0], [])
            if version not in versions:
                versions.append(version)
        return dict(sorted(found.items()))

    def offer(self, name: str, version: str) -> str | None:
        """The full version of a package that has the driver's version."""
        return next((offer for offer in self.offers.get(name, []) if upstream(offer) == version), None)

    def faults(self, version: str) -> list[str]:
        faults = self._mixed() + self._unpackaged()
        offered = (
            "; ".join(f"{name} ({', '.join(versions)})" for name, versions in self.branches().items()) or "nothing"
        )
        if not version:
            return [
                *faults,
                f"nvidia_driver_branch: {self.leader} of branch {self.branch} is not on offer here. "
                f"On offer: {offered}. Take one of these, or correct nvidia_repo_url",
            ]
        for name in self.packages():
            is_there = upstream(self.installed.get(name, "")) == version
            if not is_there and self.offer(name, version) is None:
                faults.append(
                    f"nvidia_version: {name} {version} is not on offer here, and all parts need the same version. "
                    f"On offer of {self.leader}: {offered}. Take one that has all parts, or correct nvidia_repo_url"
                )
        return faults + self._missing()

    def _mixed(self) -> list[str]:
        other = "nvidia" if self.is_archive else "ubuntu-archive"
        foreign = sorted(name for name in self.installed if WORLDS[other].match(name))
        if not foreign:
            return []
        return [
            f"nvidia_world: packages of the other world are installed ({', '.join(foreign[:4])}), and the two do not "
            f"mix. Remove them first (apt purge '*nvidia*'), or set nvidia_world: {other}"
        ]

    def _unpackaged(self) -> list[str]:
        loaded = self.facts["nvidia_module_version"]
        if not loaded or driver_parts(self.installed):
            return []
        return [
            f"driver {loaded} runs here and no package has brought it (an image, or the .run installer). "
            "Remove it first (nvidia-uninstall), or keep it and leave this role out (--skip-tags nvidia)"
        ]

    def _missing(self) -> list[str]:
        absent = [name for name in self.companions() if name not in self.installed and name not in self.offers]
        remedies = {"linux-": "Boot a kernel that is on offer first", "datacenter-": "Set nvidia_dcgm: false"}
        return [
            f"{name} is not on offer here. {remedy}, or correct the package sources"
            for name in absent
            for remedy in [
                next((text for stem, text in remedies.items() if name.startswith(stem)), "Correct nvidia_repo_url")
            ]
        ]

    def companions(self) -> list[str]:
        """What is needed beside the driver, in a version of its own."""
        names = []
        if self.is_archive:
            stem = f"linux-modules-nvidia-{self.branch}-server{self.suffix}"
            flavour = f"{stem}-{flavour_of(self.kernel)}"
            # The first is for the kernel that runs; the other, where there is one, for the kernels to come.
            names += [f"{stem}-{self.kernel}", *([flavour] if flavour in self.offers else [])]
        elif not self.settings["container"]:
            names.append(f"linux-headers-{self.kernel}")
        if self.board["nvlink5"]:
            names.append("nvlsm")
        if self.settings["dcgm"]:
            names += [f"datacenter-gpu-manager-4-{part}" for part in self.dcgm_parts()]
        return names

    def dcgm_parts(self) -> list[str]:
        # All branches from 580 on are of CUDA 13.
        return ["core", "cuda13", *(["proprietary"] if self.board["proprietary_profiling"] else [])]

    def requests(self, version: str) -> list[str]:
        """Everything that is not as it should be, so that one transaction moves all of it."""
        wanted = {name: self.offer(name, version) for name in self.packages()}
        # Metapackages ask for "at least": parts that are installed have to be named, or a way back would leave them.
        for name in driver_parts(self.installed):
            wanted.setdefault(name, self.offer(name, version))
        pinning = f"nvidia-driver-pinning-{version}"
        if not self.is_archive and pinning in self.offers:
            wanted[pinning] = self.offers[pinning][0]
        asked = [f"{name}={offer}" for name, offer in wanted.items() if offer and self.installed.get(name) != offer]
        return asked + self._companion_requests()

    def _companion_requests(self) -> list[str]:
        found = []
        for name in self.companions():
            exact = str(self.settings["dcgm_version"]) if name.startswith("datacenter-gpu-manager") else ""
            if name not in self.installed or (exact and self.installed[name] != exact):
                found.append(f"{name}={exact}" if exact else name)
        return found

    def services(self) -> list[str]:
        names = ["nvidia-persistenced"]
        names += ["nvidia-fabricmanager"] if self.fabric_manager else []
        return names + (["nvidia-dcgm"] if self.settings["dcgm"] else [])


def held_parts(installed: dict[str, str]) -> list[str]:
    """Returns the installed packages that nothing but the upgrade may move."""
    return sorted({*driver_parts(installed), *(name for name in installed if name.startswith(PINS))})


def nvidia_unheld(state: dict[str, Any]) -> list[str]:
    """Returns the installed parts of the driver that are not held yet."""
    return sorted(set(held_parts(state["installed"])) - set(state["held"]))


def nvidia_kernel_plan(state: dict[str, Any], kernel: str, configured: list[str]) -> dict[str, list[str]]:
    """Returns what brings a newer kernel: `requests` for apt, empty when there is none; `release` the holds among them.

    Without `configured` names these are the packages on hold that follow a flavour, and not one release.
    """
    followers = [name for name in state["held"] if name.startswith("linux-") and not name.endswith(f"-{kernel}")]
    names = (
        list(configured) or sorted(followers) or [f"linux-{kind}-{flavour_of(kernel)}" for kind in ("image", "headers")]
    )
    # Prebuilt modules of Ubuntu follow the kernel's flavour.
    names += [name for name in state["installed"] if name.startswith("linux-modules-nvidia-") and name not in names]
    newest = {name: state["offers"][name][0] for name in names if state["offers"].get(name)}
    requests = [f"{name}={offer}" for name, offer in newest.items() if state["installed"].get(name) != offer]
    return {"requests": requests, "release": sorted(set(names) & set(state["held"]))}


def flavour_of(kernel: str) -> str:
    """Returns `aws` of `6.8.0-1015-aws`."""
    return kernel.rsplit("-", 1)[-1]


def nvidia_idle_units(state: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    """Returns the units that should run and be enabled and are not, in the order of starting."""
    well = {name for name, unit in state["units"].items() if unit["active"] and unit["enabled"]}
    return [name for name in plan["services"] if name not in well]


def nvidia_running_units(state: dict[str, Any]) -> list[str]:
    """Returns the units that use the driver and run, in the order of stopping."""
    return [name for name in STOP_ORDER if state["units"].get(name, {}).get("active")]


def nvidia_reboot_due(plan: dict[str, Any], facts: dict[str, Any]) -> str:
    """Returns why only a reboot helps; empty when none is due."""
    if facts["nouveau_loaded"]:
        return "nouveau holds the GPUs"
    loaded = facts["nvidia_module_version"]
    if loaded and loaded != plan["version"]:
        return f"module {loaded} is loaded, and {plan['version']} is installed"
    return ""


def nvidia_problems(state: dict[str, Any], plan: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    """Returns what is not well with the driver: versions differ, GPUs are missing, units do not run."""
    version = plan["version"]
    problems = [
        f"{name} is {have}, and the driver is {version}. Run upgrade.yml with -e nvidia_version={version}"
        for name, have in sorted(driver_parts(state["installed"]).items())
        if have != version
    ]
    loaded, seen = facts["nvidia_module_version"], facts["nvml_version"]
    if loaded != version:
        cause = f"module {loaded} is loaded" if loaded else "no module is loaded"
        problems.append(f"{cause}, and {version} is installed. Look at dkms status and dmesg; then reboot")
    elif seen != version:
        problems.append(f"NVML says {seen or 'nothing'}, and the driver is {version}. Look at what nvidia-smi prints")
    elif facts["nvml_gpu_count"] != facts["gpu_count"]:
        wanted, have = facts["gpu_count"], facts["nvml_gpu_count"]
        problems.append(f"{wanted} GPUs are on PCI, and the driver sees {have}. Look for Xid in dmesg")
    for name in plan["services"]:
        if not state["units"].get(name, {}).get("active"):
            problems.append(f"{name} does not run. Look at journalctl -u {name}")
    return problems


class FilterModule:
    """What Ansible looks for in this file."""

    def filters(self) -> dict[str, Any]:
        """Names of the filters."""
        return {
            "nvidia_plan": nvidia_plan,
            "nvidia_unheld": nvidia_unheld,
            "nvidia_kernel_plan": nvidia_kernel_plan,
            "nvidia_idle_units": nvidia_idle_units,
            "nvidia_running_units": nvidia_running_units,
            "nvidia_reboot_due": nvidia_reboot_due,
            "nvidia_problems": nvidia_problems,
        }
