"""Files of the whole cluster: a line a node, whatever is known of it; and which kernel packages are held."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.playbooks.plugins import load

addresses = load("filter_plugins/addresses.py")
kernels = load("roles/base/filter_plugins/kernels.py")
GROUPS = {"head": ["head1"], "gpu_nodes": ["gpu1", "head1"], "storage": ["store1"]}


def host(address: str, hostname: str = "", key: str = "", **variables: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"default_ipv4": {"address": address}, "hostname": hostname, "fqdn": hostname}
    if key:
        facts |= {"ssh_host_key_ed25519_public": key, "ssh_host_key_ed25519_public_keytype": "ssh-ed25519"}
    return {"ansible_facts": facts, **variables}


def test_a_line_a_node_with_the_names_that_lead_to_it() -> None:
    hostvars = {
        "head1": host("10.0.0.1", "head1"),
        "gpu1": {**host("10.0.0.2", "ip-10-0-0-2"), "loopworks_private_ip": "10.9.0.2", "ansible_host": "192.0.2.2"},
        "store1": {"ansible_host": "10.0.0.3"},
    }
    hostvars["head1"]["ansible_facts"]["fqdn"] = "head1.lab.example"
    assert addresses.hosts_lines(hostvars, GROUPS).splitlines() == [
        "10.0.0.1 head1.lab.example head1",
        "10.9.0.2 gpu1 ip-10-0-0-2",
        "10.0.0.3 store1",
    ]


def test_a_name_that_two_machines_have_names_neither() -> None:
    hostvars = {
        "head1": host("10.0.0.1", "debian"),
        "gpu1": host("10.0.0.2", "debian"),
        "store1": host("10.0.0.3", "gpu1"),
    }
    assert "debian" not in addresses.hosts_lines(hostvars, GROUPS)
    assert "10.0.0.3 store1\n" in addresses.hosts_lines(hostvars, GROUPS) + "\n", "gpu1 is another machine's name"


def test_a_node_whose_address_is_a_name_is_left_to_the_name_service() -> None:
    hostvars = {"head1": {"ansible_host": "head1.example"}, "gpu1": {}, "store1": {"ansible_host": "10.0.0.3"}}
    assert addresses.hosts_lines(hostvars, GROUPS) == "10.0.0.3 store1"


def test_this_machine_alone_does_not_rename_localhost() -> None:
    hostvars = {"localhost": host("10.0.0.1", "laptop", loopworks_private_ip="127.0.0.1")}
    groups = {"head": ["localhost"], "gpu_nodes": ["localhost"]}
    assert addresses.hosts_lines(hostvars, groups) == "127.0.0.1 laptop"


def test_host_keys_by_name_and_address_and_port() -> None:
    hostvars = {
        "head1": host("10.0.0.1", key="AAA1", ansible_host="192.0.2.1"),
        "gpu1": host("10.0.0.2", key="AAA2", ansible_port=2222),
        "store1": {"ansible_facts": {"ssh_host_key_rsa_public": "BBB", "ssh_host_key_rsa_public_keytype": "ssh-rsa"}},
    }
    assert addresses.known_hosts_lines(hostvars, GROUPS).splitlines() == [
        "head1,10.0.0.1,192.0.2.1 ssh-ed25519 AAA1",
        "gpu1,10.0.0.2,[gpu1]:2222,[10.0.0.2]:2222 ssh-ed25519 AAA2",
        "store1 ssh-rsa BBB",
    ]


def test_a_node_that_is_down_keeps_its_key_and_one_that_is_gone_does_not() -> None:
    earlier = (
        "# written\ngpu1,10.0.0.2 ssh-ed25519 OLD1\nstore1,10.0.0.3 ssh-ed25519 OLD3\nold1,10.0.0.9 ssh-ed25519 X\n"
    )
    hostvars = {"head1": host("10.0.0.1", key="NEW"), "gpu1": {}, "store1": host("10.0.0.3", key="NEW3")}
    lines = addresses.known_hosts_lines(hostvars, GROUPS, earlier).splitlines()
    assert lines == [
        "head1,10.0.0.1 ssh-ed25519 NEW",
        "gpu1,10.0.0.2 ssh-ed25519 OLD1",
        "store1,10.0.0.3 ssh-ed25519 NEW3",
    ]
    assert addresses.known_hosts_lines(hostvars, GROUPS, "\n".join(lines)).splitlines() == lines


@pytest.mark.parametrize(
    ("networks", "patterns"),
    [
        (["10.20.0.0/16"], "head? gpu? store? 10.20.*"),
        (["10.20.4.0/22", "192.0.2.7/32"], "head? gpu? store? 10.20.* 192.0.2.7"),
        (["0.0.0.0/0", "fd00::/8"], "head? gpu? store?"),
    ],
)
def test_few_patterns_stand_for_all_nodes(networks: list[str], patterns: str) -> None:
    assert addresses.ssh_patterns(GROUPS, networks) == patterns


def test_files_grow_with_the_nodes_and_not_with_their_square() -> None:
    def sizes(count: int) -> list[int]:
        names = [f"gpu{number:03d}" for number in range(count)]
        hostvars = {name: host(f"10.20.{n // 250}.{n % 250 + 1}", name, "A" * 68) for n, name in enumerate(names)}
        groups = {"head": names[:1], "gpu_nodes": names}
        texts = [addresses.hosts_lines(hostvars, groups), addresses.known_hosts_lines(hostvars, groups)]
        return [len(text) for text in [*texts, addresses.ssh_patterns(groups, ["10.20.0.0/16"])]]

    began = time.process_time()
    few, many = sizes(64), sizes(512)
    assert time.process_time() - began < 5
    assert many[0] < 8.5 * few[0] and many[1] < 8.5 * few[1]
    assert many[2] == few[2]


INSTALLED = [
    "ii  linux-aws",
    "ii  linux-image-aws",
    "hi  linux-headers-aws",
    "ii  linux-image-6.8.0-1015-aws",
    "ii  linux-modules-6.8.0-1015-aws",
    "rc  linux-image-6.8.0-1009-aws",
    "ii  linux-image-6.8.0-1012-aws",
    "ii  linux-libc-dev",
    "ii  linux-base",
    "ii  linux-firmware",
]


def test_what_decides_on_the_kernel_is_held() -> None:
    assert kernels.kernels_to_hold(INSTALLED, "6.8.0-1015-aws") == [
        "linux-aws",
        "linux-image-6.8.0-1015-aws",
        "linux-image-aws",
        "linux-modules-6.8.0-1015-aws",
    ]
    assert kernels.kernels_held(INSTALLED, "6.8.0-1015-aws") == ["linux-headers-aws"]


@pytest.mark.parametrize(
    ("release", "package"),
    [
        ("5.15.0-91-generic", "linux-image-generic-hwe-22.04"),
        ("5.15.0-91-generic", "linux-headers-generic"),
        ("6.1.0-18-cloud-amd64", "linux-image-cloud-amd64"),
        ("6.1.0-18-amd64", "linux-headers-amd64"),
        ("6.12.48+deb13-amd64", "linux-image-amd64"),
    ],
)
def test_the_flavour_is_told_from_the_release(release: str, package: str) -> None:
    assert kernels.kernels_to_hold([f"ii  {package}"], release) == [package]
    assert kernels.kernels_to_hold([f"un  {package}"], release) == []
    assert kernels.kernels_to_hold([f"ii  {package}"], "6.18.4") == [], "a kernel of no package"


@given(st.lists(st.sampled_from(["ii ", "hi ", "rc "]), min_size=10, max_size=10))
def test_holding_is_done_once(states: list[str]) -> None:
    lines = [f"{state} {line[4:]}" for state, line in zip(states, INSTALLED, strict=True)]
    held = kernels.kernels_to_hold(lines, "6.8.0-1015-aws")
    after = ["hi  " + line[4:] if line[4:] in held else line for line in lines]
    assert kernels.kernels_to_hold(after, "6.8.0-1015-aws") == []
