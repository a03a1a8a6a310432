"""What goes to a node: commands that run nothing they should not, archives that are sent once."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.nodes import Node
from launch.remote import (
    agent_command,
    call,
    checkout_files,
    content_hash,
    ensure,
    pack,
    python_command,
    shell_path,
    unpack_command,
)
from launch.ssh import HostError, Outcome, Remote, on_all


class HereRemote(Remote):
    """Runs the commands in a shell on this machine, with a home folder of its own."""

    def __init__(self, home: Path) -> None:
        super().__init__(Node("here", "here"))
        self.home, self.calls = home, 0

    def run(self, command: str, stdin: bytes = b"", timeout_s: float = 60) -> Outcome:
        self.calls += 1
        env = {"HOME": str(self.home), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(["sh", "-c", command], input=stdin, env=env, capture_output=True, timeout=60, check=False)
        return Outcome(done.returncode, done.stdout, done.stderr)


def test_facts_are_collected_by_a_plain_python(tmp_path: Path) -> None:
    facts = call(HereRemote(tmp_path), sys.executable, "collect", {"paths": [str(tmp_path)], "token": str(tmp_path)})
    assert facts["machine"]["cpu_count"] >= 1
    assert facts["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["paths"][str(tmp_path)] == {**facts["paths"][str(tmp_path)], "exists": True, "writable": True}
    assert facts["token"] is True
    assert len(set(facts["ports"])) == 2


def test_missing_python_is_named(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="no Python found of: /no/python"):
        call(HereRemote(tmp_path), "/no/python", "collect", {})


def test_archive_is_sent_once_and_whole(tmp_path: Path) -> None:
    source, remote = tmp_path / "source", HereRemote(tmp_path / "home")
    (source / "a b").mkdir(parents=True)
    (source / "a b" / "x").write_text("1")
    remote.home.mkdir()
    ensure(remote, {"~/.loopworks/code/x y": source})
    assert (remote.home / ".loopworks/code/x y/a b/x").read_text() == "1"
    before = remote.calls
    ensure(remote, {"~/.loopworks/code/x y": source})
    assert remote.calls == before + 1, "only looked"
    broken = remote.run(unpack_command("~/.loopworks/code/broken"), b"no archive")
    assert broken.code
    assert not (remote.home / ".loopworks/code/broken").exists()


def test_checkout_holds_what_a_node_needs_and_no_caches(tmp_path: Path) -> None:
    names = {path.name for path in checkout_files()}
    assert {"agent.py", "__main__.py", "trainer.py", "ssh.py"} <= names
    assert not any(name.endswith(".pyc") for name in names)
    (tmp_path / "launch").mkdir()
    one = tmp_path / "launch" / "one.py"
    one.write_text("1")
    first = content_hash(tmp_path, checkout_files(tmp_path))
    packed = pack(tmp_path, checkout_files(tmp_path))
    one.touch()
    assert content_hash(tmp_path, checkout_files(tmp_path)) == first
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        assert archive.getnames() == ["launch/one.py"]
    one.write_text("2")
    assert content_hash(tmp_path, checkout_files(tmp_path)) != first


@settings(max_examples=30, deadline=None)
@given(st.text(st.characters(blacklist_characters="\0\n\r/", blacklist_categories=["Cs"]), min_size=1, max_size=20))
def test_any_path_stays_one_word_of_the_shell(name: str) -> None:
    shown = subprocess.run(
        ["sh", "-c", f"printf %s {shell_path('~/' + name)}"],
        env={"HOME": "/h"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown.stdout == f"/h/{name}"


def test_agent_command_has_neither_environment_nor_secrets() -> None:
    command = agent_command("/p y", "/c", "run", "/f", "/runs/a; b")
    assert "LOOPWORKS_RUN='/runs/a; b' setsid" in command
    assert "cat >" in command
    assert "python -m" not in python_command(["a b"], "print(1)")


def test_on_all_keeps_order_and_errors_apart() -> None:
    def act(remote: Remote) -> str:
        if remote.node.name == "b":
            raise HostError("b", "timeout", "no answer")
        return remote.node.name.upper()

    hosts = [Remote(Node(name, name)) for name in "abc"]
    answers: dict[str, Any] = on_all(hosts, act, pool_size=2)
    assert list(answers) == ["a", "b", "c"]
    assert (answers["a"], answers["c"], answers["b"].kind) == ("A", "C", "timeout")


def test_answer_is_json_after_whatever_a_login_prints(tmp_path: Path) -> None:
    class Chatty(HereRemote):
        def run(self, command: str, stdin: bytes = b"", timeout_s: float = 60) -> Outcome:
            return Outcome(0, b"welcome!\n" + json.dumps({"x": 1}).encode() + b"\n", b"")

    assert call(Chatty(tmp_path), None, "collect", {}) == {"x": 1}
