"""Modules of the role nvidia: fingerprints of key files, what apt, dpkg and systemd say, runs; templates."""

from __future__ import annotations

import base64
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.playbooks.plugins import load
from tests.unit.playbooks.test_nvidia_plan import ROLE

key, state = load("roles/nvidia/library/nvidia_apt_key.py"), load("roles/nvidia/library/nvidia_state.py")
node = load("roles/loopworks/library/loopworks_facts.py")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Two keys as gpg exports them, each with the fingerprint that gpg says."""
    if shutil.which("gpg") is None:
        pytest.skip("needs gpg")
    home = tmp_path_factory.mktemp("gnupg")
    home.chmod(0o700)
    gpg = ["gpg", "--homedir", str(home), "--batch", "--quiet", "--passphrase", ""]

    def run(*arguments: str) -> str:
        return subprocess.run([*gpg, *arguments], capture_output=True, text=True, check=True, timeout=60).stdout

    found = []
    for name, kind in (("one", "rsa2048"), ("two", "ed25519")):
        run("--quick-generate-key", f"{name} <{name}@example.org>", kind, "sign")
        line = next(line for line in run("--list-keys", "--with-colons", name).splitlines() if line.startswith("fpr"))
        found.append((run("--armor", "--export", name), line.split(":")[9]))
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=True, timeout=20)
    return found


def test_fingerprints_are_those_of_gpg(keys: list[tuple[str, str]]) -> None:
    (one, first), (two, second) = keys
    assert key.fingerprints(one) == [first]
    assert key.fingerprints(two) == [second]
    both = sorted([first, second])
    assert key.fingerprints(one + two) == both, "a second key in the file does not hide"
    assert key.is_right(one, [first])
    assert not key.is_right(one + two, [first])


@given(st.binary(max_size=200))
def test_broken_keys_are_refused_with_one_kind_of_error(data: bytes) -> None:
    name, body = "PGP PUBLIC KEY BLOCK-----", base64.b64encode(data).decode()
    text = f"-----BEGIN {name}\n\n{body}\n-----END {name}\n"
    try:
        found = key.fingerprints(text)
    except ValueError:
        return
    assert all(len(item) == 40 for item in found)


def test_what_is_no_key_is_refused() -> None:
    with pytest.raises(ValueError, match="no armored public key"):
        key.fingerprints("<html>not found</html>")


def test_offers_and_installed_packages() -> None:
    madison = """
 nvidia-open | 580.173.02-1 | file:/repo  Packages
 nvidia-open | 580.126.09-1 | file:/repo  Packages
 nvidia-open | 580.126.09-1 | file:/mirror  Packages
 libc6 | 2.36 | file:/mirror  Packages
"""
    assert state.offers(madison) == {"nvidia-open": ["580.173.02-1", "580.126.09-1"], "libc6": ["2.36"]}
    dpkg = "hi  nvidia-open 580.126.09-1\nii  libnvidia-ml1:amd64 580.126.09-1\nrc  nvidia-old 1-1\nii  vim 9\n"
    assert state.installed(dpkg) == {"nvidia-open": "580.126.09-1", "libnvidia-ml1": "580.126.09-1"}


def test_units() -> None:
    text = (
        "Id=nvidia-dcgm.service\nLoadState=loaded\nActiveState=active\nFragmentPath=/lib/x\nUnitFileState=disabled\n\n"
        "Id=dcgm-exporter.service\nLoadState=not-found\nActiveState=inactive\nFragmentPath=\nUnitFileState=\n"
    )
    assert state.units(text) == {"nvidia-dcgm": {"active": True, "enabled": False, "path": "/lib/x"}}


def test_runs_are_found_by_their_environment(tmp_path: Path) -> None:
    for pid, variables in (
        ("1", "A=b"),
        ("22", "HOME=/\0LOOPWORKS_RUN=/runs/x"),
        ("23", "LOOPWORKS_RUN=/runs/x"),
        ("9", "SLURM_JOB_ID=7"),
    ):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "environ").write_text(variables + "\0")
    (tmp_path / "77").mkdir()
    assert node.runs(tmp_path) == ["LOOPWORKS_RUN=/runs/x", "SLURM_JOB_ID=7"]


def rendered(name: str, **variables: Any) -> str:
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    return environment.from_string((ROLE / "templates" / name).read_text()).render(
        ansible_managed="by hand", **variables
    )


def test_preferences_keep_the_worlds_apart_and_the_version_exact() -> None:
    plan = {"version": "580.126.09"}
    nvidia = rendered("preferences.j2", nvidia_world="nvidia", __nvidia_plan=plan)
    archive = rendered("preferences.j2", nvidia_world="ubuntu-archive", __nvidia_plan=plan)
    for text in (nvidia, archive):
        assert text.endswith("Pin: version 580.126.09-*\nPin-Priority: 1001\n")
    assert "Pin: release o=Ubuntu\nPin-Priority: -1" in nvidia
    assert "Pin: release l=NVIDIA CUDA\nPin-Priority: -1" in archive
    assert "l=NVIDIA" not in nvidia


def test_the_daemon_keeps_persistence_mode() -> None:
    command = "/usr/bin/nvidia-persistenced --user nvpd --no-persistence-mode --verbose"
    text = rendered("persistenced.conf.j2", __nvidia_state={"persistenced_exec": command}, __nvidia_found={})
    assert text.endswith("[Service]\nExecStart=\nExecStart=/usr/bin/nvidia-persistenced --user nvpd --verbose\n")
