"""Decisions about the driver: what is installed on which GPU, what is refused, when a reboot is due."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.playbooks.plugins import load

ROLE = Path(__file__).resolve().parents[3] / "playbooks/roles/nvidia"
# Facts of boards, as PCI shows them: device, how many, NVSwitches, whether open modules serve them.
A100, H100, H200, L40S, V100, B200, RTX6000 = (
    ("0x20b2", 8, 6, True),
    ("0x2330", 8, 4, True),
    ("0x2335", 8, 4, True),
    ("0x26b9", 4, 0, True),
    ("0x1db5", 8, 0, False),
    ("0x2901", 8, 0, True),
    ("0x2bb5", 8, 0, True),
)
OLD, NEW = "580.126.09", "580.173.02"


nvidia, boards = load("roles/nvidia/filter_plugins/nvidia.py"), load("roles/nvidia/filter_plugins/boards.py")


def facts(board: tuple[str, int, int, bool], **more: Any) -> dict[str, Any]:
    device, count, switches, is_open = board
    found = {"gpus": [{"device": device}] * count, "gpu_count": count, "nvswitch_count": switches}
    found |= {"open_modules": is_open, "secure_boot": False, "nouveau_loaded": False, "container": False}
    return {**found, "nvidia_module_version": "", "nvml_version": "", "nvml_gpu_count": 0, **more}


def settings(**more: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"world": "nvidia", "branch": "580", "version": "", "modules": "auto", "dcgm": True}
    values |= {"own_signing_key": False, "fabric_manager": "auto", "dcgm_version": "", "distribution": "Debian"}
    values |= {"kernel": "6.1.0-18-amd64", "container": False, "check_mode": False, "upgrade": False}
    return {**values, **more}


def offers(*versions: str) -> dict[str, list[str]]:
    names = ("nvidia-open", "cuda-drivers", "nvidia-fabricmanager", "libnvidia-ml1", "nvidia-kernel-open-dkms")
    found = {name: [f"{version}-1" for version in versions] for name in names}
    found |= {f"nvidia-driver-pinning-{version}": [f"{version}-1"] for version in versions}
    found |= {f"datacenter-gpu-manager-4-{part}": ["1:4.6.0-1"] for part in ("core", "cuda13", "proprietary")}
    return {**found, "linux-headers-6.1.0-18-amd64": ["6.1.76-1"], "nvlsm": ["2026.06.1-1"]}


def state(offered: dict[str, list[str]] | None = None, **more: Any) -> dict[str, Any]:
    offered = offers("620.19.01", "595.71.05", NEW, OLD) if offered is None else offered
    return {"offers": offered, "installed": {}, "held": [], "units": {}, "drained": "", **more}


def installed(version: str = OLD) -> dict[str, str]:
    names = (
        "nvidia-open",
        "libnvidia-ml1",
        "nvidia-kernel-open-dkms",
        "nvidia-fabricmanager",
        f"nvidia-driver-pinning-{version}",
    )
    others = {f"datacenter-gpu-manager-4-{part}": "1:4.6.0-1" for part in ("core", "cuda13", "proprietary")}
    return {**dict.fromkeys(names, f"{version}-1"), **others, "linux-headers-6.1.0-18-amd64": "installed"}


def plan(board: tuple[str, int, int, bool], have: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return plan_of(have or state(), facts(board), settings(**more))


def plan_of(have: dict[str, Any], seen: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = nvidia.nvidia_plan(have, seen, boards.nvidia_board(seen, wanted), wanted)
    return found


@pytest.mark.parametrize(
    ("board", "wanted", "unwanted"),
    [
        (
            A100,
            {f"nvidia-open={NEW}-1", f"nvidia-fabricmanager={NEW}-1", "datacenter-gpu-manager-4-proprietary"},
            "cuda-drivers",
        ),
        (H100, {f"nvidia-open={NEW}-1", f"nvidia-fabricmanager={NEW}-1"}, "datacenter-gpu-manager-4-proprietary"),
        (H200, {f"nvidia-open={NEW}-1", f"nvidia-fabricmanager={NEW}-1"}, "datacenter-gpu-manager-4-proprietary"),
        (L40S, {f"nvidia-open={NEW}-1"}, "nvidia-fabricmanager"),
        (V100, {f"cuda-drivers={NEW}-1", "datacenter-gpu-manager-4-proprietary"}, "nvidia-open"),
        (B200, {f"nvidia-open={NEW}-1", f"nvidia-fabricmanager={NEW}-1", "nvlsm"}, "cuda-drivers"),
        (RTX6000, {f"nvidia-open={NEW}-1"}, "nvidia-fabricmanager"),
    ],
    ids=["a100", "h100", "h200", "l40s", "v100", "b200", "rtx-pro-6000"],
)
def test_each_board(board: tuple[str, int, int, bool], wanted: set[str], unwanted: str) -> None:
    made = plan(board)
    always = {"datacenter-gpu-manager-4-core", "datacenter-gpu-manager-4-cuda13", "linux-headers-6.1.0-18-amd64"}
    assert made["faults"] == []
    assert wanted | always | {f"nvidia-driver-pinning-{NEW}={NEW}-1"} <= set(made["requests"])
    assert not any(request.split("=")[0] == unwanted for request in made["requests"])
    assert ("nvidia-fabricmanager" in made["services"]) == any("fabric" in request for request in made["requests"])


def test_what_is_installed_stays_and_an_upgrade_takes_the_newest_of_the_branch() -> None:
    have = state(installed=installed(), held=["nvidia-open", "libnvidia-ml1", "vim"])
    assert plan(A100, have)["requests"] == []
    assert not plan(A100)["moves"], "nothing is there that could be in use"
    made = plan(A100, have, upgrade=True)
    assert made["moves"]
    assert made["version"] == NEW
    assert f"libnvidia-ml1={NEW}-1" in made["requests"], "metapackages would leave it"
    assert made["release"] == ["libnvidia-ml1", "nvidia-open"], "of others' holds none"
    assert made["stale"] == [f"nvidia-driver-pinning-{OLD}"]
    back = plan(A100, state(installed=installed(NEW)), version=OLD)
    assert {f"{name}={OLD}-1" for name in ("nvidia-open", "nvidia-fabricmanager", "libnvidia-ml1")} <= set(
        back["requests"]
    )


def test_a_part_that_was_moved_by_hand_is_put_back() -> None:
    have = state(installed={**installed(), "libnvidia-ml1": f"{NEW}-1"})
    assert plan(A100, have)["requests"] == [f"libnvidia-ml1={OLD}-1"]


def test_tools_of_ubuntu_with_versions_of_their_own_are_left_alone() -> None:
    have = state(installed={**installed(), "nvidia-settings": "510.47.03-0ubuntu1"})
    assert plan(A100, have)["requests"] == []
    assert "nvidia-settings" not in nvidia.nvidia_unheld(have)


def test_parts_that_are_not_on_offer_in_one_version_are_refused() -> None:
    offered = offers(NEW)
    offered["nvidia-fabricmanager"] = [f"{OLD}-1"]
    (fault,) = plan(A100, state(offered))["faults"]
    assert "nvidia-fabricmanager 580.173.02 is not on offer" in fault
    assert plan(L40S, state(offered))["faults"] == []


def test_a_branch_that_is_not_on_offer_names_those_that_are() -> None:
    (fault,) = plan(A100, state(offers("595.71.05", "595.58.03", "620.19.01")))["faults"]
    assert "branch 580 is not on offer" in fault
    assert "595 (595.71.05, 595.58.03); 620 (620.19.01)" in fault


def test_check_mode_on_a_bare_host_knows_no_packages() -> None:
    made = plan(A100, state({}), check_mode=True)
    assert (made["is_known"], made["faults"], made["requests"]) == (False, [], [])
    assert plan(A100, state({}))["faults"]


def test_a_driver_that_no_package_has_brought_is_left_alone() -> None:
    made = plan_of(state(), facts(A100, nvidia_module_version=OLD), settings())
    assert made["requests"] == []
    assert f"driver {OLD} runs here and no package has brought it" in made["faults"][0]


def archive(kernel: str) -> dict[str, list[str]]:
    version = f"{OLD}-0ubuntu0.24.04.1"
    found = {"nvidia-headless-no-dkms-580-server-open": [version], "nvidia-utils-580-server": [version]}
    found |= {"nvidia-headless-no-dkms-550-server-open": [version], "nvidia-fabricmanager-580": [version]}
    found |= {f"linux-modules-nvidia-580-server-open-{name}": ["6.8.0-45.45"] for name in (kernel, "aws")}
    return {
        **found,
        **{f"datacenter-gpu-manager-4-{part}": ["1:4.6.0-1"] for part in ("core", "cuda13", "proprietary")},
    }


def test_ubuntus_archive_gives_signed_modules_for_the_running_kernel() -> None:
    kernel = "6.8.0-1015-aws"
    ubuntu = {"world": "ubuntu-archive", "distribution": "Ubuntu", "kernel": kernel}
    made = plan(A100, state(archive(kernel)), **ubuntu)
    assert made["faults"] == []
    names = [request.split("=")[0] for request in made["requests"]]
    assert names[:3] == [
        "nvidia-headless-no-dkms-580-server-open",
        "nvidia-utils-580-server",
        "nvidia-fabricmanager-580",
    ]
    assert {f"linux-modules-nvidia-580-server-open-{name}" for name in (kernel, "aws")} <= set(names)
    assert not any("dkms" in name and "no-dkms" not in name for name in names)
    assert not any(name.startswith("linux-headers") for name in names)
    assert boards.nvidia_faults(facts(A100, secure_boot=True), settings(**ubuntu)) == []
    (fault,) = plan(A100, state(archive("6.8.0-9-aws")), **ubuntu)["faults"]
    assert fault.startswith("linux-modules-nvidia-580-server-open-6.8.0-1015-aws is not on offer")


@pytest.mark.parametrize(
    ("world", "foreign"), [("nvidia", "nvidia-headless-no-dkms-580-server-open"), ("ubuntu-archive", "nvidia-open")]
)
def test_worlds_do_not_mix(world: str, foreign: str) -> None:
    kernel = "6.8.0-1015-aws"
    have = state({**offers(NEW), **archive(kernel)}, installed={foreign: f"{OLD}-1"})
    made = plan(A100, have, world=world, distribution="Ubuntu", kernel=kernel, container=True)
    assert f"({foreign}), and the two do not mix" in " ".join(made["faults"])


def test_branches_are_those_that_may_be_chosen() -> None:
    specification = yaml.safe_load((ROLE / "meta/argument_specs.yml").read_text())["argument_specs"]["main"]
    assert tuple(specification["options"]["nvidia_driver_branch"]["choices"]) == boards.BRANCHES


@pytest.mark.parametrize(
    ("board", "more", "said"),
    [
        (A100, {"branch": "570"}, "570 no longer gets updates. Take one of 580, 595, 620"),
        (A100, {"branch": "610"}, "610 is not a branch that this version knows"),
        (A100, {"version": "595.71.05"}, "595.71.05 is not of branch 580. Set nvidia_driver_branch to 595 too"),
        (V100, {"branch": "595"}, "595 has no modules for GPU 0x1db5 (older than Turing). Set 580"),
        (V100, {"modules": "open"}, "open modules do not serve GPU 0x1db5"),
        (B200, {"modules": "proprietary"}, "GPU 0x2901 (Blackwell or newer) has open modules only"),
        (A100, {"world": "ubuntu-archive"}, "is for Ubuntu, and this is Debian"),
    ],
)
def test_refused(board: tuple[str, int, int, bool], more: dict[str, Any], said: str) -> None:
    (fault,) = boards.nvidia_faults(facts(board), settings(**more))
    assert said in fault


def test_secure_boot_points_to_signed_modules() -> None:
    secure = facts(A100, secure_boot=True)
    (fault,) = boards.nvidia_faults(secure, settings(distribution="Ubuntu"))
    assert "secure boot is on" in fault
    assert "nvidia_world: ubuntu-archive" in fault
    assert boards.nvidia_faults(secure, settings(own_signing_key=True)) == []


@given(st.integers(0x1000, 0x3FFF))
def test_some_modules_serve_every_gpu(device: int) -> None:
    board = (f"{device:#06x}", 1, 0, device >= 0x1E00)
    assert boards.nvidia_faults(facts(board), settings()) == []


def test_reboot_is_due_only_for_another_module_or_nouveau() -> None:
    made = plan(A100, state(installed=installed()))
    due = nvidia.nvidia_reboot_due
    assert due(made, facts(A100, nvidia_module_version=OLD)) == ""
    assert due(made, facts(A100)) == "", "no module yet: it is loaded, not rebooted"
    assert due(made, facts(A100, nvidia_module_version=NEW)) == f"module {NEW} is loaded, and {OLD} is installed"
    assert due(made, facts(A100, nouveau_loaded=True)) == "nouveau holds the GPUs"


def test_problems_of_a_running_driver() -> None:
    units = {
        name: {"active": True, "enabled": True}
        for name in ("nvidia-persistenced", "nvidia-fabricmanager", "nvidia-dcgm")
    }
    have = state(installed=installed(), units=units)
    made = plan(A100, have)
    well = {"nvidia_module_version": OLD, "nvml_version": OLD, "nvml_gpu_count": 8}

    def problems(have: dict[str, Any] = have, **more: Any) -> list[str]:
        found: list[str] = nvidia.nvidia_problems(have, made, facts(A100, **{**well, **more}))
        return found

    assert problems() == []
    assert "8 GPUs are on PCI, and the driver sees 7" in problems(nvml_gpu_count=7)[0]
    assert "NVML says no answer" in problems(nvml_version="no answer")[0]
    assert "no module is loaded" in problems(nvidia_module_version="", nvml_version="")[0]
    stopped = {**have, "units": {**units, "nvidia-fabricmanager": {"active": False, "enabled": True}}}
    assert problems(stopped) == ["nvidia-fabricmanager does not run. Look at journalctl -u nvidia-fabricmanager"]
    moved = {**have, "installed": {**installed(), "nvidia-fabricmanager": f"{NEW}-1"}}
    assert f"nvidia-fabricmanager is {NEW}, and the driver is {OLD}" in problems(moved)[0]
    assert nvidia.nvidia_idle_units(stopped, made) == ["nvidia-fabricmanager"]
    assert nvidia.nvidia_running_units(have) == ["nvidia-dcgm", "nvidia-fabricmanager", "nvidia-persistenced"]


def test_kernel_follows_what_is_held() -> None:
    offered = {"linux-image-amd64": ["6.1.155-1", "6.1.140-1"], "linux-headers-amd64": ["6.1.155-1"]}
    held = ["linux-image-amd64", "linux-image-6.1.0-18-amd64", "nvidia-open"]
    have = state(offered, installed={"linux-image-amd64": "6.1.140-1"}, held=held)
    made = nvidia.nvidia_kernel_plan(have, "6.1.0-18-amd64", [])
    assert made == {"requests": ["linux-image-amd64=6.1.155-1"], "release": ["linux-image-amd64"]}
    have["held"] = []
    both = nvidia.nvidia_kernel_plan(have, "6.1.0-18-amd64", [])["requests"]
    assert both == ["linux-image-amd64=6.1.155-1", "linux-headers-amd64=6.1.155-1"]
