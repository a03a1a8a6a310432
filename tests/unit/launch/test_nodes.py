"""Which hosts a run uses."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.errors import UsageError
from launch.nodes import Node, expand, inventory_nodes, parse_nodes, read_inventory, ssh_options


def names(text: str) -> list[str]:
    return [node.name for node in parse_nodes(text)]


def test_lists_ranges_users_and_ports() -> None:
    assert names("a,b c") == ["a", "b", "c"]
    assert names("gpu[01-03,7],x") == ["gpu01", "gpu02", "gpu03", "gpu7", "x"]
    assert names("r[1-2]n[1-2]") == ["r1n1", "r1n2", "r2n1", "r2n2"]
    assert parse_nodes("ubuntu@10.0.0.1:2222") == (Node("ubuntu@10.0.0.1:2222", "10.0.0.1", "ubuntu", 2222),)
    assert parse_nodes("[fd00::1]")[0].host == "fd00::1"


def test_file_of_nodes_has_comments(tmp_path: Path) -> None:
    path = tmp_path / "nodes"
    path.write_text("# rack 1\ngpu[1-2]\n\nb  # spare\n")
    assert names(f"@{path}") == ["gpu1", "gpu2", "b"]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "names no host"),
        ("a,a", "more than once"),
        ("gpu[3-1]", "runs backwards"),
        ("gpu[1-99999]", "too long"),
        ("gpu[x]", "no number or range"),
        ("gpu[1", "unpaired"),
        ("-oProxyCommand=touch", "is not a host"),
        ("a;rm", "is not a host"),
        ("@/nowhere", "No such file"),
    ],
)
def test_what_is_no_list_of_hosts_is_refused(text: str, cause: str) -> None:
    with pytest.raises(UsageError, match=cause):
        parse_nodes(text)


@given(st.integers(0, 999), st.integers(0, 40), st.integers(1, 4))
def test_ranges_keep_order_width_and_count(first: int, more: int, width: int) -> None:
    found = expand(f"n[{str(first).zfill(width)}-{first + more}]")
    assert [int(name[1:]) for name in found] == list(range(first, first + more + 1))
    assert all(len(name) >= width + 1 for name in found)


def test_inventory_variables_mean_what_they_mean_to_ansible() -> None:
    listing = {
        "_meta": {
            "hostvars": {
                "g1": {
                    "ansible_host": "10.0.0.1",
                    "ansible_user": "ubuntu",
                    "ansible_port": "2222",
                    "ansible_ssh_private_key_file": "~/k",
                    "ansible_ssh_common_args": "-J bastion -o UserKnownHostsFile=/kh",
                }
            }
        },
        "gpus": {"hosts": ["g1", "g2"]},
        "all": {"children": ["gpus"]},
    }
    first, second = inventory_nodes(listing)
    assert first == Node("g1", "10.0.0.1", "ubuntu", 2222, "~/k", "bastion", None, "/kh")
    assert second == Node("g2", "g2")


def test_inventory_is_read_by_ansible_itself(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text(
        "all:\n  vars: {ansible_user: ubuntu}\n  children:\n    gpus:\n      hosts:\n"
        "        g[1:2]: {ansible_host: '10.0.0.{{ inventory_hostname[1:] }}'}\n    other: {hosts: {x: {}}}\n"
    )
    nodes = read_inventory(str(path), "gpus")
    assert [node.name for node in nodes] == ["g1", "g2"]
    assert {node.user for node in nodes} == {"ubuntu"}
    with pytest.raises(UsageError, match="no such file"):
        read_inventory(str(tmp_path / "none.yml"))
    with pytest.raises(UsageError):
        read_inventory(str(path), "nogroup")


def test_ssh_options_are_read_in_every_form() -> None:
    assert ssh_options("-J a,b -oUser=x -o 'ProxyCommand=ssh -W %h:%p b'") == {
        "proxyjump": "a,b",
        "user": "x",
        "proxycommand": "ssh -W %h:%p b",
    }
