"""512 hosts on paper: inventory, checks, and the files that every node needs of all others.

    python -m benchmarks.fleet [--nodes 512]

Makes an inventory and cached facts of so many nodes, lets the real Ansible read and check it, and renders what the
roles render (/etc/hosts, known hosts; once for all nodes), beside the usual way: a Jinja template on each node that
loops over `hostvars`. Prints seconds, bytes, how they grow from an eighth of the nodes, and the ratio to that peer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.machine import description

ROOT = Path(__file__).resolve().parent.parent
KEY = "AAAAC3NzaC1lZDI1NTE5AAAAI" + "B" * 43
# What each node does where nobody renders once; measured on this many nodes and multiplied.
PEER_NODES = 4
PEER = (
    "{% for name in groups['all'] %}{{ name }},{{ hostvars[name]['ansible_host'] }} "
    "ssh-ed25519 {{ hostvars[name]['ansible_facts']['ssh_host_key_ed25519_public'] }}\n{% endfor %}"
)


def write_fleet(folder: Path, nodes: int) -> None:
    """Writes the inventory, and lets Ansible put facts of every host into its cache, as after a first run."""
    names = {f"gpu{number:04d}": f"10.20.{number // 250}.{number % 250 + 1}" for number in range(1, nodes)}
    names["head1"] = "10.20.250.1"
    hosts = {name: {"ansible_host": address} for name, address in names.items()}
    head = {"head1": hosts.pop("head1")}
    variables = {"loopworks_cluster_cidr": "10.20.0.0/16", "loopworks_allowed_cidrs": ["10.1.0.0/16"]}
    inventory = {"all": {"vars": variables, "children": {"head": {"hosts": head}, "gpu_nodes": {"hosts": hosts}}}}
    (folder / "hosts.json").write_text(json.dumps(inventory))
    facts = {
        "default_ipv4": {"address": "{{ ansible_host }}"},
        "hostname": "{{ inventory_hostname }}",
        "fqdn": "{{ inventory_hostname }}",
        "ssh_host_key_ed25519_public": KEY,
        "ssh_host_key_ed25519_public_keytype": "ssh-ed25519",
        "cacheable": True,
    }
    task = {"ansible.builtin.set_fact": facts}
    ansible(
        folder,
        "ansible-playbook",
        "play.yml",
        playbook=json.dumps([{"hosts": "all", "gather_facts": False, "tasks": [task]}]),
    )


def ansible(folder: Path, *command: str, playbook: str = "") -> float:
    """Runs one of Ansible's programs over the fleet; returns seconds. Raises RuntimeError when it fails."""
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_CACHE_PLUGIN_CONNECTION": str(folder / "facts"),
        "ANSIBLE_FILTER_PLUGINS": str(ROOT / "playbooks/filter_plugins"),
    }
    if playbook:
        (folder / "play.yml").write_text(playbook)
    argv = [str(Path(sys.executable).parent / command[0]), "-i", str(folder / "hosts.json"), *command[1:]]
    began = time.perf_counter()
    done = subprocess.run(argv, env=environment, cwd=folder, capture_output=True, text=True, timeout=500, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stdout[-1500:]}{done.stderr[-500:]}")
    return time.perf_counter() - began


def play(content: str, out: Path, times: int = 1) -> str:
    """A playbook that renders `content` so many times on this machine and writes it."""
    copy = {"content": content, "dest": f"{out}-{{{{ item }}}}", "mode": "0644"}
    task = {"ansible.builtin.copy": copy, "loop": list(range(times))}
    return json.dumps(
        [{"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": [task] if times else []}]
    )


def measure(nodes: int) -> dict[str, float]:
    """Seconds and bytes for a fleet of so many nodes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_fleet(folder, nodes)
        run = ["ansible-playbook", "play.yml"]
        empty = ansible(folder, *run, playbook=play("", folder / "none", 0))
        result = {
            "inventory": ansible(folder, "ansible-inventory", "--list"),
            "check": ansible(folder, "ansible-playbook", str(ROOT / "playbooks/check.yml")),
        }
        for what, text in (
            ("hosts", "{{ hostvars | hosts_lines(groups) }}"),
            ("known_hosts", "{{ hostvars | known_hosts_lines(groups) }}"),
        ):
            result[what] = ansible(folder, *run, playbook=play(text, folder / what)) - empty
            result[f"{what}_bytes"] = (folder / f"{what}-0").stat().st_size
        result["peer"] = (ansible(folder, *run, playbook=play(PEER, folder / "peer", PEER_NODES)) - empty) / PEER_NODES
        return result


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=512)
    nodes = parser.parse_args().nodes
    print(description())
    few, many = measure(nodes // 8), measure(nodes)
    print(f"{'':24}{nodes // 8:>8} nodes{nodes:>8} nodes   growth (8 = linear)")
    for what in ("inventory", "check", "hosts", "known_hosts"):
        print(f"{what + ', s':24}{few[what]:>14.2f}{many[what]:>14.2f}{many[what] / few[what]:>10.1f}")
    for what in ("hosts_bytes", "known_hosts_bytes"):
        print(f"{what + ' a node':24}{few[what]:>14,.0f}{many[what]:>14,.0f}{many[what] / few[what]:>10.1f}")
    alone = many["peer"] * nodes
    print(f"known hosts, a template on each of {nodes} nodes: {alone:.0f} s; once for all: {many['known_hosts']:.2f} s")
    print(f"ratio {many['known_hosts'] / alone:.4f}")


if __name__ == "__main__":
    main()
