"""Rolling upgrades on hosts that really reboot: drain, change, validate, return; what fails stays drained."""

from __future__ import annotations

import json
import platform
import re
import shutil
from pathlib import Path

import pytest

from tests.system.hosts.cluster import Host
from tests.system.playbooks import gpu_packages, lustre_standin
from tests.system.playbooks.ansible import Ansible, Outcome
from tests.system.playbooks.gpu_fleet import MARK, NEW, OLD, Fleet

pytest_plugins = ("tests.system.playbooks.gpu_fixtures",)
pytestmark = pytest.mark.system

# A run as `fab` keeps it: it leaves the node when it sees the mark. And one that does not.
LEAVES = f"while [ ! -e {MARK} ]; do sleep 0.2; done; cp {MARK} /root/seen"
STAYS = "sleep infinity"
KERNEL = "dpkg-query -W -f '${Version}' linux-image-amd64"
FSX = "/opt/fsx"
# At each boot the mark goes that says that the host is a container.
AS_MACHINE = """[Service]
Type=oneshot
ExecStart=rm -f /run/systemd/container
[Install]
WantedBy=sysinit.target
"""
LOCAL = """
- hosts: localhost
  connection: local
  gather_facts: false
  vars: {ansible_python_interpreter: "{{ ansible_playbook_python }}"}
  tasks:
    - ansible.builtin.include_role: {name: loopworks, tasks_from: reboot}
      vars: {loopworks_reboot: true, loopworks_reboot_reason: another module is loaded}
"""


def start_run(fleet: Fleet, kind: str, script: str) -> None:
    fleet.run(kind, f"systemd-run --unit=run --setenv=LOOPWORKS_RUN=/shared/runs/demo sh -c '{script}'")


def said(outcome: Outcome) -> str:
    return re.sub(r"\s+", " ", outcome.output)


def is_marked(fleet: Fleet, kind: str) -> bool:
    return fleet.hosts[kind].ssh(f"test -e {MARK}", check=False).returncode == 0


def lustre(suite: str) -> str:
    """Variables of a file system of FSx, with a suite of the stand-in for AWS's repository."""
    return json.dumps(
        {
            "loopworks_provider": "aws",
            "loopworks_storage": {"kind": "fsx-lustre", "source": "fs-1.fsx.example@tcp:/abc", "mount_point": "/fsx"},
            "storage_automount": False,  # which a container does not have
            "storage_lustre_repository": f"file:{FSX}",
            "storage_lustre_suite": suite,
            "storage_lustre_key": f"file://{FSX}/{'key' if suite == 'here' else suite}.asc",
        }
    )


@pytest.fixture
def fsx_client(installed: Fleet, tmp_path: Path) -> Host:
    """A host that sees AWS's repository of the Lustre client, and is no container after its next boot."""
    host = installed.hosts["l40s"]
    lustre_standin.repository(tmp_path / "repository")
    shutil.copytree(tmp_path / "repository", host.root / FSX.lstrip("/"))
    (host.root / "etc/systemd/system/as-machine.service").write_text(AS_MACHINE)
    host.ssh("systemctl enable -q as-machine; mkdir -p /lib/modules/$(uname -r)/build")
    return host


def driver_versions(fleet: Fleet, kind: str) -> set[str]:
    return {version for name, version in fleet.versions(kind).items() if not name.startswith("datacenter")}


def test_nodes_one_after_the_other(installed: Fleet) -> None:
    kinds = ("h100-sxm", "l40s")
    boots = {kind: installed.boot(kind) for kind in kinds}
    start_run(installed, "l40s", LEAVES)
    done = installed.play("upgrade.yml", "-e", f"nvidia_version={NEW}", kinds=kinds)
    assert done.returncode == 0, done.output
    plays = done.output.split("PLAY [Upgrade node after node]")[1:]
    names = [installed.hosts[kind].name for kind in kinds]
    assert [[name for name in names if f"[{name}]" in play] for play in plays] == [[names[0]], [names[1]]]
    for kind in kinds:
        assert driver_versions(installed, kind) == {f"{NEW}-1"}
        assert installed.loaded(kind) == NEW
        assert installed.boot(kind) != boots[kind]
        assert not is_marked(installed, kind)
        assert set(installed.active(kind, "nvidia-persistenced", "nvidia-dcgm")) == {"active"}
        assert "nvidia-open" in installed.run(kind, "apt-mark showhold").split()
    assert installed.active("h100-sxm", "nvidia-fabricmanager") == ["active"]
    mark = json.loads(installed.run("l40s", "cat /root/seen"))
    assert mark["reason"] == f"driver upgrade to {NEW}"

    again = installed.play("upgrade.yml", "-e", f"nvidia_version={NEW}", kinds=("l40s",))
    assert (again.returncode, again.changed()) == (0, 0), again.changes()


def test_driver_that_does_not_come_up_stays_drained_and_the_old_one_comes_back(installed: Fleet) -> None:
    # Without a version: the newest of the branch, whose Fabric Manager does not start.
    before = driver_versions(installed, "h200")
    failed = installed.play("upgrade.yml", kinds=("a100-sxm", "h200"))
    assert failed.returncode != 0
    name = installed.hosts["a100-sxm"].name
    assert f"{name} stays drained, and nodes after it are not touched" in said(failed)
    assert "nvidia-fabricmanager" in said(failed)
    assert is_marked(installed, "a100-sxm")
    assert driver_versions(installed, "a100-sxm") == {f"{gpu_packages.BROKEN}-1"}
    assert (driver_versions(installed, "h200"), is_marked(installed, "h200")) == (before, False)

    back = installed.play("upgrade.yml", "-e", f"nvidia_version={OLD}", kinds=("a100-sxm",))
    assert back.returncode == 0, back.output
    assert driver_versions(installed, "a100-sxm") == {f"{OLD}-1"}
    assert installed.loaded("a100-sxm") == OLD
    assert installed.active("a100-sxm", "nvidia-fabricmanager") == ["active"]
    assert not is_marked(installed, "a100-sxm")


def test_run_that_does_not_leave(installed: Fleet) -> None:
    kind, image = "l40s", "linux-image-amd64 linux-headers-amd64"
    old = gpu_packages.KERNELS[0]
    installed.run(
        kind, f"apt-get install -y -q {' '.join(f'{name}={old}' for name in image.split())} && apt-mark hold {image}"
    )
    start_run(installed, kind, STAYS)
    options = ("-e", "upgrade_what=kernel", "-e", "nvidia_upgrade_drain_timeout_s=2")
    kept = installed.play("upgrade.yml", *options, kinds=(kind, "v100-sxm2"))
    assert kept.returncode != 0
    assert f"{installed.hosts[kind].name} stays drained" in said(kept)
    assert "Wait until no process of a run is left" in said(kept)
    assert (is_marked(installed, kind), is_marked(installed, "v100-sxm2")) == (True, False)
    assert installed.run(kind, KERNEL) == old
    installed.run(kind, "systemctl stop run")


def test_a_new_kernel_brings_its_lustre_client_or_keeps_the_node(installed: Fleet, fsx_client: Host) -> None:
    """One reboot for this and for what another role has noted; the host of before, which is drained still."""
    kind = "l40s"
    installed.run(kind, "echo 'efa: another kernel module' > /run/loopworks-reboot")
    boot, driver = installed.boot(kind), driver_versions(installed, kind)
    upgrade = ("upgrade.yml", "-e", "upgrade_what=kernel", "-e")
    without = installed.play(*upgrade, lustre("elsewhere"), kinds=(kind,))
    assert without.returncode != 0
    assert f"there is no Lustre client for kernel {platform.release()}: boot the kernel before it" in said(without)
    assert without.output.count("TASK [loopworks : Reboot, few at a time]") == 1, "one for both reasons"
    assert is_marked(installed, kind)
    assert installed.run(kind, KERNEL) == gpu_packages.KERNELS[1]
    new_boot = installed.boot(kind)
    assert new_boot != boot

    done = installed.play(*upgrade, lustre("here"), kinds=(kind,))
    assert done.returncode == 0, done.output
    assert installed.boot(kind) == new_boot
    assert fsx_client.ssh(f"cat {lustre_standin.NOTES}").stdout.startswith("fs-1.fsx.example@tcp:/abc /fsx ")
    assert driver_versions(installed, kind) == driver
    held = {"linux-image-amd64", "linux-headers-amd64", f"lustre-client-modules-{platform.release()}"}
    assert held <= set(installed.run(kind, "apt-mark showhold").split())
    assert not is_marked(installed, kind)


def test_reboot_over_a_local_connection_is_refused(tmp_path: Path) -> None:
    playbook = tmp_path / "local.yml"
    playbook.write_text(LOCAL)
    # Check mode, so that a refusal that is missing does no harm.
    outcome = Ansible(tmp_path, "all: {hosts: {localhost: }}").play(str(playbook), "--check")
    assert outcome.returncode != 0
    assert "this is a local connection: Ansible would end with it. Reboot by hand" in said(outcome)
