"""Passwords are refused only where nobody depends on them; and how that is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.playbooks.plugins import load

KEY = "ssh-ed25519 AAAAC3Nz someone"

logins = load("roles/ssh/filter_plugins/logins.py")
login = load("roles/loopworks/library/loopworks_login.py")

LOG = """Server listening on 0.0.0.0 port 22.
Accepted publickey for admin from 10.1.0.5 port 40122 ssh2: ED25519 SHA256:x
Accepted password for admin from 10.1.0.5 port 4012 ssh2
Accepted publickey for admin from 10.1.0.55 port 4012 ssh2: ED25519 SHA256:x
"""


@pytest.mark.parametrize(
    ("client", "port", "method"),
    [
        ("10.1.0.5", "40122", "publickey"),
        ("10.1.0.5", "4012", "password"),
        ("10.1.0.5", "401", "unknown"),
        ("10.1.0.9", "4012", "unknown"),
    ],
)
def test_the_log_tells_how_this_very_connection_came_in(client: str, port: str, method: str) -> None:
    assert login.accepted(LOG, client, port) == method


def test_a_port_that_is_used_again_counts_by_its_last_login() -> None:
    log = LOG + "Accepted publickey for admin from 10.1.0.5 port 4012 ssh2\n"
    assert login.accepted(log, "10.1.0.5", "4012") == "publickey"


def test_the_connection_is_that_of_the_nearest_ancestor_that_has_one(tmp_path: Path) -> None:
    def process(pid: str, name: str, parent: int, environment: str) -> None:
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "stat").write_text(f"{pid} ({name}) S {parent} 1 1 0")
        (tmp_path / pid / "environ").write_text(environment)

    process("self", "python3", 30, "PATH=/bin\0")
    process("30", "sudo (a) b", 20, "XSSH_CONNECTION=no\0")
    process("20", "sh", 10, "HOME=/x\0SSH_CONNECTION=10.1.0.5 40122 10.20.0.1 2222\0")
    process("10", "sshd", 0, "SSH_CONNECTION=10.9.9.9 1 10.20.0.1 22\0")
    assert login.ssh_connection(str(tmp_path)) == ["10.1.0.5", "40122", "10.20.0.1", "2222"]
    (tmp_path / "20" / "environ").write_text("")
    (tmp_path / "10" / "environ").write_text("")
    assert login.ssh_connection(str(tmp_path)) == []


def test_only_the_wanted_settings_of_the_daemon() -> None:
    settings = login.sshd_settings("port 22\npasswordauthentication no\nmaxstartups 10:30:100\n")
    assert settings == {"passwordauthentication": "no", "maxstartups": "10:30:100"}


@pytest.mark.parametrize(
    ("method", "password", "interactive", "refused"),
    [
        ("publickey", "yes", "yes", True),
        ("password", "yes", "no", False),
        ("keyboard-interactive/pam", "no", "yes", False),
        ("unknown", "yes", "no", False),
        ("unknown", "no", "no", True),
        ("local", "yes", "no", False),
    ],
)
def test_passwords_go_only_when_that_is_safe(method: str, password: str, interactive: str, refused: bool) -> None:
    found = {
        "method": method,
        "sshd": {"passwordauthentication": password, "kbdinteractiveauthentication": interactive},
    }
    assert logins.passwords_refused(found, "auto") is refused
    assert logins.passwords_refused(found, "refuse") is True
    assert logins.passwords_refused(found, "keep") is False


def test_keys_come_from_files_or_as_they_are_each_once(tmp_path: Path) -> None:
    path = tmp_path / "id.pub"
    path.write_text(f"# mine\n{KEY}\n\necdsa-sha2-nistp256 AAAA other\n")
    assert logins.public_keys([str(path), KEY]) == [KEY, "ecdsa-sha2-nistp256 AAAA other"]


def test_a_private_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "id"
    path.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n")
    with pytest.raises(ValueError, match=r"is not a public key.*\.pub"):
        logins.public_keys([str(path)])
