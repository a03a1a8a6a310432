"""What containers cannot show: mounts, disks, limits, kernel settings, modules, and that all comes back after a reboot.

The tests follow one another on the same two machines.
"""

from __future__ import annotations

import time

import pytest

from tests.system.playbooks.ansible import Ansible
from tests.vm.machine import Machine, Machines

pytestmark = pytest.mark.system
PLAYBOOKS = ("base.yml", "ssh.yml", "firewall.yml", "storage.yml")
SCRATCH = '{"storage_scratch": "/scratch", "storage_scratch_devices": ["/dev/vdb", "/dev/vdc"]}'
TIMEOUT_S = 900


def test_check_mode_on_blank_machines(ansible: Ansible) -> None:
    outcome = ansible.play("storage.yml", "--check", "--diff", timeout_s=TIMEOUT_S)
    assert outcome.returncode == 0, outcome.output


@pytest.mark.parametrize("playbook", PLAYBOOKS)
def test_apply_and_apply_again(ansible: Ansible, playbook: str) -> None:
    first = ansible.play(playbook, timeout_s=TIMEOUT_S)
    assert first.returncode == 0, first.output
    second = ansible.play(playbook, timeout_s=TIMEOUT_S)
    assert (second.returncode, second.changed()) == (0, 0), second.changes()


def mounted(machines: Machines) -> None:
    head, node = machines.all
    # The data disk of the stack was found by its volume's id, whatever name it has here.
    assert head.output("findmnt -no LABEL /srv/shared") == "lw-export"
    assert "nfs4" in node.output("ls /shared >/dev/null; findmnt -nt nfs4 -o FSTYPE,OPTIONS /shared")
    assert "vers=4.2" in node.output("findmnt -nt nfs4 -o OPTIONS /shared")
    text = str(time.time())
    node.ssh(f"echo {text} > /shared/runs/from-node", user="loopworks")
    assert head.output("cat /shared/runs/from-node", user="loopworks") == text
    assert node.output("stat -c %U /shared/runs/from-node") == "loopworks"
    # Root of a node is nobody on the server.
    assert node.ssh("touch /shared/runs/by-root", check=False).returncode != 0


def test_storage_is_served_and_mounted(machines: Machines) -> None:
    mounted(machines)


def test_scratch_is_made_once_and_never_over_data(machines: Machines, ansible: Ansible) -> None:
    node = machines.all[1]
    node.ssh("mkfs.ext2 -q -L precious /dev/vdc")
    only = ("--limit", f"{node.name},localhost", "-e", SCRATCH)
    refused = ansible.play("storage.yml", "-v", *only, timeout_s=TIMEOUT_S)
    assert (refused.returncode, refused.changed()) == (0, 0), refused.output
    assert "/dev/vdc carries ext2: such a disk is never formatted" in refused.output
    assert node.output("blkid -o value -s LABEL /dev/vdc") == "precious"
    node.ssh("wipefs -aq /dev/vdc")
    made = ansible.play("storage.yml", *only, timeout_s=TIMEOUT_S)
    assert made.returncode == 0, made.output
    assert "raid0" in node.output("cat /proc/mdstat") and node.output("findmnt -no LABEL /scratch") == "lw-scratch"
    again = ansible.play("storage.yml", *only, timeout_s=TIMEOUT_S)
    assert (again.returncode, again.changed()) == (0, 0), again.changes()


def settings(machine: Machine) -> None:
    assert machine.output("ulimit -l; ulimit -n", user="loopworks").split()[0] == "unlimited"
    assert machine.output("systemd-run --quiet --pipe sh -c 'ulimit -l'") == "unlimited"
    assert machine.output("sysctl -n vm.max_map_count") == "1048576"
    assert machine.output("systemctl is-active chrony loopworks-firewall").split() == ["active", "active"]
    assert "policy drop" in machine.output("nft list table inet loopworks")


def test_limits_settings_and_clock(machines: Machines) -> None:
    for machine in machines.all:
        settings(machine)


def test_a_module_kept_out_stays_out_of_the_initial_ram_disk(machines: Machines) -> None:
    """As role nvidia does for nouveau: a blacklist counts from the start only when the initial RAM disk has it."""
    node = machines.all[1]
    node.ssh("printf 'blacklist nouveau\\noptions nouveau modeset=0\\n' > /etc/modprobe.d/loopworks-test.conf")
    node.ssh("echo loop > /etc/modules-load.d/loopworks-test.conf; update-initramfs -u", timeout_s=300)
    listed = node.output("lsinitramfs /boot/initrd.img-$(uname -r)", timeout_s=120)
    assert "etc/modprobe.d/loopworks-test.conf" in listed


def test_all_comes_back_after_a_reboot(machines: Machines) -> None:
    """Both at once, as after a power cut: the node may come up before its server does."""
    head, node = machines.all
    node.ssh("systemctl --no-block reboot", check=False)
    head.reboot()
    node.wait()
    for machine in machines.all:  # sshd answers before the rest is up
        machine.ssh("systemctl is-system-running --wait", check=False, timeout_s=120)
    mounted(machines)
    for machine in machines.all:
        settings(machine)
        assert machine.output("systemctl --failed --no-legend --plain") == ""
        # systemd breaks a cycle by leaving out a unit, and any could be hit: the packet filter too.
        assert "ordering cycle" not in machine.output("journalctl --boot --no-pager")
    assert node.output("findmnt -no LABEL /scratch") == "lw-scratch"
    assert node.output("test -d /sys/module/loop && echo loaded") == "loaded"
