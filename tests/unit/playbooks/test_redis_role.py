"""The queue server is not open to the world, and knows its users by hash."""

from __future__ import annotations

import hashlib
from pathlib import Path

import jinja2
import pytest

from tests.unit.playbooks.plugins import load

public_addresses = load("roles/redis/filter_plugins/listening.py").public_addresses
ROLE = Path(__file__).resolve().parents[3] / "playbooks/roles/redis"
SETTINGS = {
    "redis_bind": ["10.20.0.10", "127.0.0.1"],
    "redis_port": 6379,
    "redis_tls_cert": "",
    "redis_tls_ca": "",
    "redis_appendfsync": "everysec",
    "redis_maxmemory": "0",
    "redis_exporter_password": "",
    "__redis_password": "correct horse",
}


def render(name: str, **values: object) -> str:
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters["hash"] = lambda text, kind: hashlib.new(kind, text.encode()).hexdigest()
    return environment.from_string((ROLE / "templates" / name).read_text()).render({**SETTINGS, **values})


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "8.8.8.8", "2600::1", "*", "head.example.org", "-0.0.0.0"])
def test_what_the_world_may_reach_is_told(address: str) -> None:
    assert public_addresses(["127.0.0.1", address]) == [address]


@pytest.mark.parametrize("address", ["10.20.0.10", "127.0.0.1", "::1", "172.16.3.4", "192.168.1.1", "fd00::1"])
def test_private_addresses_pass(address: str) -> None:
    assert public_addresses([address]) == []


def test_nothing_is_dropped_and_everything_is_on_disk() -> None:
    lines = render("redis.conf.j2").splitlines()
    assert "bind 10.20.0.10 127.0.0.1" in lines
    assert {"appendonly yes", "maxmemory-policy noeviction", "protected-mode yes", "port 6379"} <= set(lines)


def test_with_tls_the_plain_port_is_closed() -> None:
    lines = render("redis.conf.j2", redis_tls_cert="cert.pem", redis_tls_ca="ca.pem").splitlines()
    assert {"port 0", "tls-port 6379", "tls-ca-cert-file /etc/redis/ca.pem"} <= set(lines)
    assert "port 6379" not in lines


def test_users_are_known_by_hash_and_default_is_off() -> None:
    text = render("users.acl.j2", redis_exporter_password="look")
    assert text.startswith("user default off\n")
    assert f"#{hashlib.sha256(b'correct horse').hexdigest()}" in text
    assert "correct horse" not in text and "look" not in text
    assert [line.split()[1] for line in text.splitlines()] == ["default", "loopworks", "exporter"]


def test_without_its_password_there_is_no_exporter() -> None:
    assert "exporter" not in render("users.acl.j2")
