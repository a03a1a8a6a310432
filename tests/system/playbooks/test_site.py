"""site.yml from bare hosts to training, and again; what is slow is done once, by a fixture."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.system.conftest import TINY
from tests.system.playbooks.ansible import Ansible
from tests.system.playbooks.bare import BareCluster, BareHost
from tests.system.playbooks.conftest import NETWORK, PEOPLE, WORLD, Applied
from training.records import RunFolder

pytestmark = pytest.mark.system

SSH, REDIS, BOARDS = 22, 6379, 8888
# What listens on a head or a node and is nobody else's business.
PORTS = (SSH, REDIS, BOARDS, 9090, 9093, 9100, 9402, 3000, 29500)
NODE_UNITS = ("ssh", "loopworks-firewall", "prometheus-node-exporter")
HEAD_UNITS = (*NODE_UNITS, "redis-server", "prometheus", "prometheus-alertmanager", "nginx", "loopworks-alerts")


def as_trainer(head: BareHost, command: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Runs a command on the head as the account that trains, in a login shell."""
    return head.ssh(f"su - loopworks -c {shlex.quote(command)}", check=False, timeout_s=timeout_s)


def answers(address: str, origin: str) -> set[int]:
    """Which of the ports accept a connection from one of this machine's addresses."""

    def accepts(port: int) -> bool:
        try:
            socket.create_connection((address, port), timeout=3, source_address=(origin, 0)).close()
        except OSError:
            return False
        return True

    with ThreadPoolExecutor(len(PORTS)) as pool:
        return {port for port, accepted in zip(PORTS, pool.map(accepts, PORTS), strict=True) if accepted}


def test_check_mode_on_bare_hosts_finds_nothing_to_fail_at_and_touches_nothing(applied: Applied) -> None:
    assert applied.blank.returncode == 0, applied.blank.output[-6000:]
    assert applied.blank.changed() > 0
    assert applied.before == ""


def test_the_first_run_ends_with_a_verdict_on_every_node_and_says_what_was_left_out(applied: Applied) -> None:
    assert set(applied.first.hosts) >= {"lwp1", "lwp2", "lwp3"}
    for left_out in ("nvidia", "efa", "rdma"):
        assert f"{left_out}: " in applied.first.output


def test_a_second_run_and_check_mode_after_it_change_nothing(site: Ansible, applied: Applied) -> None:
    second = site.play("site.yml")
    assert second.returncode == 0, second.output[-4000:]
    assert second.changed() == 0, second.changes()
    check = site.play("site.yml", "--check", "--diff")
    assert check.returncode == 0, check.output[-4000:]
    assert check.changed() == 0, check.changes()


def test_fab_train_on_the_head_trains_across_both_nodes(
    bare: BareCluster, applied: Applied, tiny_dataset: Path
) -> None:
    head, shared = bare.hosts[0], bare.shared[0]
    subprocess.run(["cp", "-r", tiny_dataset, shared / "tiny"], check=True, timeout=20)
    (shared / "tiny.yaml").write_text(TINY.format(data=shared / "tiny", runs=shared / "runs"))
    command = (
        f"cd /opt/loopworks/src && /opt/loopworks/venv/bin/fab train --nodes lwp2,lwp3 --config {shared}/tiny.yaml"
    )
    done = as_trainer(head, f"{command} --name site --set distributed.ranks_per_node=1 --json", timeout_s=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["steps"] == 6
    run = RunFolder(shared / "runs/site")
    assert len(run.read_metrics()) == 6
    assert {path.stem for path in (run.path / "nodes").glob("*.json")} == {"lwp2", "lwp3"}


def test_people_reach_three_ports_the_world_none_and_nodes_all(bare: BareCluster, applied: Applied) -> None:
    head, node, other = bare.hosts
    assert answers(head.address, PEOPLE) == {SSH, REDIS, BOARDS}
    assert answers(node.address, PEOPLE) == {SSH}
    for host in bare.hosts:
        assert answers(host.address, WORLD) == set()
    # From node to node any port is open: whatever the ranks choose.
    listener = 'import socket; s = socket.create_server(("", 29777)); s.accept()'
    node.ssh(f"systemd-run --collect --unit=listener python3 -c {shlex.quote(listener)}")
    reach = f'import socket; socket.create_connection(("{node.address}", 29777), 3)'
    deadline = time.monotonic() + 10
    while other.ssh(f"python3 -c {shlex.quote(reach)}", check=False).returncode:
        assert time.monotonic() < deadline


def test_redis_takes_nobody_without_the_password(bare: BareCluster, applied: Applied) -> None:
    head = bare.hosts[0]
    with socket.create_connection((head.address, REDIS), timeout=3) as connection:
        connection.sendall(b"PING\r\n")
        assert b"NOAUTH" in connection.recv(200)
    listening = head.ssh("ss -Hltn 'sport = :6379' | awk '{print $4}'").stdout.split()
    assert set(listening) <= {f"{head.address}:6379", "127.0.0.1:6379", "[::1]:6379"}


def test_every_target_of_prometheus_is_up(bare: BareCluster, applied: Applied) -> None:
    address = f"http://{bare.hosts[0].address}:{BOARDS}/prometheus/api/v1/targets?state=active"
    deadline = time.monotonic() + 45
    while True:
        with urllib.request.urlopen(address, timeout=5) as reply:
            targets = json.load(reply)["data"]["activeTargets"]
        health = {(target["labels"]["job"], target["labels"].get("node", "")): target["health"] for target in targets}
        nodes = {node for job, node in health if job == "node"}
        if nodes == {"lwp1", "lwp2", "lwp3"} and set(health.values()) == {"up"}:
            break
        assert time.monotonic() < deadline, health
        time.sleep(1)
    # The head tells of the runs, and takes the alerts.
    assert ("control", "") in health
    told = bare.hosts[0].ssh("curl -s http://127.0.0.1:9402/").stdout
    assert told.startswith("Loopworks receives alerts")


def test_after_a_reboot_every_unit_is_back(bare: BareCluster, applied: Applied) -> None:
    for host, units in zip(bare.hosts, (HEAD_UNITS, NODE_UNITS), strict=False):
        began = host.ssh("stat -c %Y /run/systemd").stdout
        host.ssh("systemctl reboot", check=False)
        deadline = time.monotonic() + 60
        while host.ssh("stat -c %Y /run/systemd", check=False).stdout in ("", began):
            assert time.monotonic() < deadline, f"{host.name} does not come back"
            time.sleep(0.3)
        for unit in units:
            while host.ssh(f"systemctl is-active {unit}", check=False).stdout.strip() != "active":
                assert time.monotonic() < deadline, host.ssh(f"systemctl status {unit}", check=False).stdout
                time.sleep(0.3)
        failed = host.ssh("systemctl --failed --no-legend --plain").stdout
        assert failed.strip() == ""
    assert answers(bare.hosts[0].address, WORLD) == set(), "the firewall is there again, too"


def test_a_node_that_does_not_answer_does_not_stop_the_others(
    site: Ansible, bare: BareCluster, applied: Applied
) -> None:
    lost = bare.hosts[2]
    lost.cut()
    try:
        outcome = site.play("base.yml", "-e", "ansible_timeout=5")
    finally:
        lost.mend()
        lost.wait()
    assert outcome.returncode != 0
    assert outcome.hosts["lwp3"][2] == 1
    assert outcome.hosts["lwp1"][3] == outcome.hosts["lwp2"][3] == 0
    assert outcome.hosts["lwp2"][0] > 3


def test_validate_names_the_node_that_is_unfit(site: Ansible, bare: BareCluster, applied: Applied) -> None:
    node = bare.hosts[2]
    node.ssh("systemctl stop prometheus-node-exporter && chmod 000 /opt/loopworks/venv")
    try:
        outcome = site.play("validate.yml")
    finally:
        node.ssh("systemctl start prometheus-node-exporter; chmod 755 /opt/loopworks/venv")
    assert outcome.returncode != 0
    verdict = [line for line in outcome.output.splitlines() if "lwp3" in line and "fail" in line.lower()]
    assert verdict, outcome.output[-3000:]
    assert outcome.hosts["lwp2"][3] == 0
    assert site.play("validate.yml", "--limit", f"{node.name},localhost").returncode == 0


UNFIT: dict[str, object] = {
    "nvidia_driver_branch": "515",
    "loopworks_allowed_cidrs": ["0.0.0.0/0"],
    "ssh_admin_keys": ["/nowhere.pub"],
    "rdma_stack": "doca",
    "loopworks_efa_enabled": True,
}


@pytest.mark.parametrize(
    ("settings", "messages"),
    [
        (
            UNFIT,
            [
                "all hosts: nvidia_driver_branch: 515 no longer gets updates",
                "all hosts: loopworks_allowed_cidrs: 0.0.0.0/0 lets the whole internet reach 22, 6379 and 8888",
                "all hosts: ssh_admin_keys: there is no file /nowhere.pub",
                "g: rdma_stack: doca cannot be on a node with EFA",
            ],
        ),
        ({"nvidia_version": "595.71.05"}, ["all hosts: nvidia_version: 595.71.05 is not of branch 580"]),
    ],
    ids=["many", "version"],
)
def test_bad_input_is_refused_before_any_host_is_touched(
    settings: dict[str, object], messages: list[str], tmp_path: Path
) -> None:
    """The hosts of this inventory do not exist: a connection would be said as unreachable."""
    hosts = {"ansible_host": "127.0.0.9", "ansible_port": 9, "loopworks_cluster_cidr": f"{NETWORK}.0/24", **settings}
    inventory = {
        "all": {
            "children": {
                "head": {"hosts": {"h": hosts}},
                "gpu_nodes": {"hosts": {"g": {**hosts, "ansible_host": "127.0.0.8"}}},
            }
        }
    }
    ansible = Ansible(tmp_path, json.dumps(inventory))
    for arguments, looked_at in (((), "localhost"), (("--limit", "g"), "g")):
        outcome = ansible.play("site.yml", *arguments)
        assert outcome.returncode != 0
        said = " ".join(outcome.output.split())
        assert [message for message in messages if message not in said] == []
        assert set(outcome.hosts) == {looked_at}
        assert outcome.hosts[looked_at][2] == 0, "nobody tried to reach it"
