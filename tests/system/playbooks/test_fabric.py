"""EFA up to the installer's command line, InfiniBand by its facts, and never two stacks on one host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.playbooks.bare import BareCluster
from tests.system.playbooks.efa_standin import EFA, Publisher, plug
from tests.system.playbooks.own_hosts import Play

pytest_plugins = ("tests.system.playbooks.own_hosts",)
pytestmark = pytest.mark.system
ROOT = "/opt/fabric"
# A mark that says whether the host is a container; away until the next boot, the host looks like a machine.
AS_MACHINE = "mv /run/systemd/container /run/systemd/container.away"
REBOOT_MARK, BOOT = "/run/loopworks-reboot", "cat /proc/sys/kernel/random/boot_id"
MELLANOX = {"vendor": "0x15b3", "device": "0x1021", "class": "0x020700"}


@pytest.fixture(scope="module")
def publisher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Publisher]:
    made = Publisher(tmp_path_factory.mktemp("efa") / "vendor")
    yield made
    made.close()


def flat(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def test_nothing_to_do_is_said(play: Play) -> None:  # noqa: F811
    for playbook, reason in (("efa.yml", "efa: not a machine of AWS"), ("rdma.yml", "rdma: no Mellanox or InfiniBand")):
        outcome = play(playbook, "-v")
        assert (outcome.returncode, outcome.changed()) == (0, 0), outcome.output
        assert reason in outcome.output


def test_efa_up_to_the_installers_command_line(own: BareCluster, play: Play, publisher: Publisher) -> None:  # noqa: F811
    """The first node looks like a machine, the second is the container that it is."""
    machine, container = own.hosts[1:]
    for node in (machine, container):
        plug(node, ROOT, EFA, 4)
    machine.ssh(AS_MACHINE)
    settings: dict[str, Any] = {
        "loopworks_provider": "aws",
        "loopworks_facts_root": ROOT,
        "efa_installer_file": str(publisher.publish("1.51.0")),
        "efa_key_fingerprint": publisher.fingerprint,
    }
    check = play("efa.yml", "--check", "--diff", **settings)
    assert check.returncode == 0, check.output

    only = ("--limit", f"{machine.name},localhost")
    foreign = play("efa.yml", *only, **{**settings, "efa_key_fingerprint": "0" * 40})
    archive = Path(settings["efa_installer_file"])
    genuine = archive.read_bytes()
    archive.write_bytes(genuine + b"x")
    altered = play("efa.yml", *only, **settings)
    archive.write_bytes(genuine)
    for refused in (foreign, altered):
        assert refused.returncode != 0
        assert "no valid signature by key" in refused.output and "nothing was installed" in refused.output
    assert machine.ssh("ls /var/log/efa-standin.log", check=False).returncode != 0

    boots = [node.ssh(BOOT).stdout for node in (machine, container)]
    applied = play("efa.yml", **settings)
    assert applied.returncode == 0, applied.output
    now = [node.ssh(BOOT).stdout for node in (machine, container)]
    assert (now[0] != boots[0], now[1] == boots[1]) == (True, True), "the installer asks for it on the machine only"
    assert machine.ssh(f"cat {REBOOT_MARK}", check=False).returncode != 0, "one reboot, and it is no longer due"
    calls = [node.ssh("cat /var/log/efa-standin.log").stdout for node in (machine, container)]
    assert calls == ["-y\n", "-y --skip-kmod --skip-limit-conf --no-verify\n"]
    path = machine.ssh("cat /etc/ld.so.conf.d/loopworks-efa.conf").stdout.strip()
    assert path == "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu"
    machine.ssh(f"{AS_MACHINE}; echo 'rdma: other modules' > {REBOOT_MARK}")
    machine.ssh("systemd-run --unit=run --setenv=LOOPWORKS_RUN=/shared/runs/demo sleep infinity")
    again = play("efa.yml", "-v", **settings)
    assert (again.returncode, again.changed()) == (0, 0), again.changes()
    waits = "a reboot is due (rdma: other modules), and a run is on the node (LOOPWORKS_RUN=/shared/runs/demo)"
    assert waits in flat(again.output)
    assert machine.ssh(BOOT).stdout == now[0]
    machine.ssh(f"systemctl stop run; rm {REBOOT_MARK}")
    short = play("efa.yml", *only, efa_expected_devices=8, **settings)
    assert "libfabric sees 4 of 8 EFA devices" in flat(short.output)
    both = play("efa.yml", *only, rdma_stack="doca", **settings)
    assert both.returncode != 0 and "both bring an rdma-core of their own" in flat(both.output)
    machine.ssh("mv /run/systemd/container.away /run/systemd/container")


def test_infiniband_ports_are_checked(own: BareCluster, play: Play) -> None:  # noqa: F811
    node = own.hosts[2]
    node.ssh(f"rm -rf {ROOT}")
    plug(node, ROOT, MELLANOX, 2)
    for number, state in enumerate(("4: ACTIVE", "1: DOWN")):
        node.ssh(f"mkdir -p {ROOT}/sys/class/infiniband/mlx5_{number}/ports/1")
        node.ssh(f"echo '{state}' > {ROOT}/sys/class/infiniband/mlx5_{number}/ports/1/state")
    only = ("--limit", f"{node.name},localhost")
    check = play("rdma.yml", "--check", "--diff", *only, loopworks_facts_root=ROOT)
    assert check.returncode == 0, check.output
    down = play("rdma.yml", *only, loopworks_facts_root=ROOT, rdma_umad=True)
    assert down.returncode != 0
    assert "mlx5_1 port 1 is DOWN. Check cable, switch and subnet manager" in flat(down.output)
    node.ssh(f"echo '4: ACTIVE' > {ROOT}/sys/class/infiniband/mlx5_1/ports/1/state")
    well = play("rdma.yml", *only, loopworks_facts_root=ROOT, rdma_umad=True)
    assert (well.returncode, well.changed()) == (0, 0), well.output
    assert node.ssh("grep -v '#' /etc/modules-load.d/loopworks-rdma.conf").stdout.split()[-1] == "ib_umad"
