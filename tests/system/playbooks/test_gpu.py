"""The driver on nodes of six kinds, from dummy packages of a signed repository: pinned, held, matched, and refused."""

from __future__ import annotations

import json
import re

import pytest

from tests.system.playbooks import gpu_packages
from tests.system.playbooks.gpu_fleet import NEW, OLD, WITH_GPU, Fleet

pytest_plugins = ("tests.system.playbooks.gpu_fixtures",)
pytestmark = pytest.mark.system


def test_each_kind_gets_what_it_needs(installed: Fleet) -> None:
    assert installed.versions("none") == {}
    for kind in WITH_GPU:
        versions = installed.versions(kind)
        driver = {name: version for name, version in versions.items() if not name.startswith("datacenter")}
        assert set(driver.values()) == {f"{OLD}-1"}, (kind, driver)
        assert installed.loaded(kind) == OLD
        is_open = kind != "v100-sxm2"
        assert ("nvidia-open" in driver, "nvidia-kernel-open-dkms" in driver) == (is_open, is_open), kind
        assert ("cuda-drivers" in driver, "nvidia-kernel-dkms" in driver) == (not is_open, not is_open), kind
        has_switch = gpu_packages.GPUS[kind][2] > 0
        assert ("nvidia-fabricmanager" in driver) is has_switch, kind
        assert f"nvidia-driver-pinning-{OLD}" in driver
        dcgm = {name.removeprefix("datacenter-gpu-manager-4-") for name in versions if name.startswith("datacenter")}
        older = {"proprietary"} if kind in ("a100-sxm", "v100-sxm2") else set()
        assert dcgm == {"core", "cuda13"} | older, kind
        units = ["nvidia-persistenced", "nvidia-dcgm", *(["nvidia-fabricmanager"] if has_switch else [])]
        assert installed.active(kind, *units) == ["active"] * len(units), kind
        assert "--no-persistence-mode" not in installed.run(
            kind, "ps -C sleep -o args= ; systemctl show -p ExecStart nvidia-persistenced"
        )
        assert set(driver) <= set(installed.run(kind, "apt-mark showhold").split()), kind
    assert not installed.hosts["a100-sxm"].ssh("ls /etc/apt/sources.list.d | grep cuda", check=False).stdout


def test_second_run_and_check_change_nothing(installed: Fleet) -> None:
    again = installed.play("nvidia.yml", kinds=("a100-sxm", "v100-sxm2", "none"))
    assert (again.returncode, again.changed()) == (0, 0), again.output
    check = installed.play("nvidia.yml", "--check", "--diff", kinds=("a100-sxm",))
    assert (check.returncode, check.changed()) == (0, 0), check.output


def test_holds_hold(installed: Fleet) -> None:
    """Each of pin, hold and blacklist is enough by itself; without all three the driver would move."""
    kind, preferences = "l40s", "/etc/apt/preferences.d"
    before = installed.versions(kind)
    installed.run(kind, "apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -y dist-upgrade")
    assert installed.versions(kind) == before
    installed.run(kind, "apt-get install -y --no-install-recommends unattended-upgrades >/dev/null 2>&1")
    origins = 'Unattended-Upgrade::Origins-Pattern { "label=NVIDIA CUDA"; };\n'
    (installed.hosts[kind].root / "etc/apt/apt.conf.d/60tests").write_text(origins)
    dry = "unattended-upgrade --dry-run --verbose 2>&1 | grep -o 'libnvidia-ml1' | head -1"
    held = "$(apt-mark showhold)"
    assert installed.run(kind, dry) == ""
    installed.run(
        kind, f"apt-mark showhold >/root/held; apt-mark unhold {held}; mkdir /root/pins; mv {preferences}/* /root/pins"
    )
    assert installed.run(kind, dry) == "", "the blacklist alone"
    installed.run(kind, "mv /etc/apt/apt.conf.d/52loopworks-nvidia /root/blacklist")
    assert installed.run(kind, dry).strip() == "libnvidia-ml1", "this test can fail"
    simulate = "apt-get -s dist-upgrade | grep -c '^Inst libnvidia-ml1' || true"
    assert installed.run(kind, simulate).strip() == "1"
    installed.run(kind, "apt-mark hold $(cat /root/held)")
    assert installed.run(kind, simulate).strip() == "0", "the hold alone"
    installed.run(kind, f"apt-mark unhold {held}; mv /root/pins/* {preferences}")
    assert installed.run(kind, simulate).strip() == "0", "the pin alone"
    mended = installed.play("nvidia.yml", kinds=(kind,))
    assert mended.returncode == 0, mended.output
    assert set(installed.run(kind, "apt-mark showhold").split()) == set(installed.run(kind, "cat /root/held").split())


def test_what_cannot_work_is_refused_before_anything_is_touched(installed: Fleet) -> None:
    before = {kind: installed.versions(kind) for kind in WITH_GPU}
    old = installed.play("nvidia.yml", "-e", "nvidia_driver_branch=570")
    assert old.returncode != 0
    assert "nvidia_driver_branch: 570 no longer gets updates" in old.output

    branch = installed.play("nvidia.yml", "-e", "nvidia_driver_branch=595", kinds=("a100-sxm", "v100-sxm2"))
    text = re.sub(r"\s+", " ", branch.output)
    assert "nvidia-fabricmanager 595.71.05 is not on offer here, and all parts need the same version" in text
    assert "595 has no modules for GPU 0x1db5 (older than Turing). Set 580 for this host" in text
    assert [branch.hosts[installed.hosts[kind].name][3] for kind in ("a100-sxm", "v100-sxm2")] == [1, 1]

    absent = installed.play("nvidia.yml", "-e", "nvidia_version=580.99.99", kinds=("h100-sxm",))
    text = re.sub(r"\s+", " ", absent.output)
    assert "nvidia-open 580.99.99 is not on offer here" in text
    assert f"580 ({gpu_packages.BROKEN}, {NEW}, {OLD}); 595 (595.71.05); 620 (620.19.01)" in text

    other = "0" * 40
    key = installed.play("nvidia.yml", "-e", json.dumps({"nvidia_repo_key_fingerprints": [other]}), kinds=("h200",))
    assert f"{other} are expected; it was not laid down" in re.sub(r"\s+", " ", key.output)
    assert {kind: installed.versions(kind) for kind in WITH_GPU} == before


def test_another_version_waits_while_a_run_is_on_the_node(installed: Fleet) -> None:
    kind = "l40s"
    before = installed.versions(kind)
    installed.run(kind, "systemd-run --unit=run --setenv=LOOPWORKS_RUN=/shared/runs/demo sleep infinity")
    waits = installed.play("nvidia.yml", "-e", f"nvidia_version={NEW}", "-v", kinds=(kind,))
    installed.run(kind, "systemctl stop run")
    assert (waits.returncode, waits.changed()) == (0, 0), waits.output
    text = re.sub(r"\s+", " ", waits.output)
    assert "a run is on the node (LOOPWORKS_RUN=/shared/runs/demo): upgrade.yml drains it first" in text
    assert installed.versions(kind) == before
