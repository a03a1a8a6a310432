"""The rules say what they should, nft takes them, and nobody is locked out by a list."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.playbooks.plugins import load

PLAYBOOKS = Path(__file__).resolve().parents[3] / "playbooks"
networks = load("filter_plugins/networks.py")


def rules(**variables: Any) -> str:
    folder = PLAYBOOKS / "roles/firewall/templates"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["by_family"] = networks.by_family
    values: dict[str, Any] = {
        "ansible_managed": "Ansible managed",
        "loopworks_allowed_cidrs": ["10.1.0.0/16"],
        "loopworks_cluster_cidrs": ["10.20.0.0/16"],
        "firewall_tcp_ports": [22],
        "firewall_extra_rules": [],
        "__firewall_login": {"client": "10.1.0.5", "port": 22},
    }
    return environment.get_template("firewall.nft.j2").render(values | variables)


CASES: list[dict[str, Any]] = [
    {},
    {"loopworks_allowed_cidrs": []},
    {"loopworks_cluster_cidrs": []},
    {"loopworks_allowed_cidrs": ["0.0.0.0/0", "::/0", "10.0.0.0/8"]},
    {"loopworks_allowed_cidrs": ["10.1.0.0/16", "10.1.2.0/24", "fd00::/8"], "firewall_tcp_ports": [22, 6379, 8888]},
    {"firewall_extra_rules": ["tcp dport 2049 ip saddr 10.9.0.0/16 accept"]},
]


@pytest.mark.skipif(shutil.which("nft") is None or os.geteuid() != 0, reason="needs nft and root")
@pytest.mark.parametrize("variables", CASES, ids=range(len(CASES)))
def test_nft_takes_the_rules(variables: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "rules"
    path.write_text(rules(**variables))
    # In a network namespace of its own, where there is the right to look, and nothing to change.
    done = subprocess.run(
        ["unshare", "--net", "nft", "-c", "-f", path], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 0, done.stderr


def test_what_is_not_named_is_dropped() -> None:
    text = rules()
    chain = text[text.index("chain input") :]
    assert "policy drop" in chain
    statements = [line.strip() for line in chain.splitlines()[2:] if line.strip() not in ("", "}")]
    assert statements[0] == "ct state established,related accept"
    assert statements[-1] == "counter drop"
    unconditional = [line for line in statements if line == "accept"]
    assert unconditional == []


def test_people_reach_ports_and_nodes_reach_all() -> None:
    text = rules(firewall_tcp_ports=[22, 6379, 8888])
    assert "ip saddr { 10.1.0.0/16 } tcp dport { 22, 6379, 8888 } accept" in text
    assert "ip saddr { 10.20.0.0/16 } accept" in text


def test_the_port_that_ansible_uses_is_among_them() -> None:
    assert "tcp dport { 22, 2222 } accept" in rules(__firewall_login={"client": "10.1.0.5", "port": 2222})
    assert "tcp dport { 22 } accept" in rules(__firewall_login={"client": "", "port": 0})


def test_without_people_only_the_cluster_gets_in() -> None:
    assert "dport {" not in rules(loopworks_allowed_cidrs=[])


def test_only_the_own_table_is_touched() -> None:
    assert "flush" not in rules()
    assert set(re.findall(r"^(?:delete )?table (.*?)(?: \{)?$", rules(), re.MULTILINE)) == {"inet loopworks"}


@pytest.mark.parametrize(
    ("address", "inside"),
    [
        ("10.20.3.4", True),
        ("10.21.0.1", False),
        ("::ffff:10.20.3.4", True),
        ("fd00::1", True),
        ("fe80::1%eth0", False),
        ("127.0.0.1", True),
        ("::1", True),
    ],
)
def test_where_a_connection_may_come_from(address: str, inside: bool) -> None:
    assert networks.admits(["10.20.0.0/16", "fd00::/8"], address) is inside


@given(st.lists(st.ip_addresses(v=4), min_size=1, max_size=8), st.integers(8, 32), st.ip_addresses(v=4))
def test_rules_and_lock_out_check_agree(starts: list[Any], prefix: int, address: Any) -> None:
    texts = [f"{start}/{prefix}" for start in starts]
    merged = networks.by_family(texts)["ip"]
    for item in [address, *starts]:
        assert networks.admits(texts, str(item)) is networks.admits(merged, str(item))
