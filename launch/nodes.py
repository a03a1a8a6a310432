"""Which hosts a run uses: `--nodes a,b,c`, `--nodes gpu[01-16]`, `--nodes @file`, or an Ansible inventory."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.errors import UsageError

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
MOST_NODES = 4096
INVENTORY_TIMEOUT_S = 60


@dataclass(frozen=True)
class Node:
    """A host and how to reach it; what is None comes from ssh_config, as for `ssh NAME`."""

    name: str
    host: str
    user: str | None = None
    port: int | None = None
    key: str | None = None
    jump: str | None = None
    proxy_command: str | None = None
    known_hosts: str | None = None


def parse_nodes(text: str) -> tuple[Node, ...]:
    """Returns the nodes of `--nodes`, in order. Raises UsageError for what is not a list of hosts."""
    names = _read_file(Path(text[1:])) if text.startswith("@") else [text]
    found = [_node(name) for item in names for part in _split(item) for name in expand(part)]
    if not found:
        raise UsageError(f"--nodes {text!r} names no host", "for example --nodes gpu1,gpu2 or --nodes gpu[01-16]")
    return _unique(found)


def expand(pattern: str) -> list[str]:
    """Expands ranges as clusters write them: gpu[01-03,7] is gpu01, gpu02, gpu03 and gpu7."""
    match = re.search(r"\[([^\[\]]*)\]", pattern)
    if match is None:
        if "[" in pattern or "]" in pattern:
            raise UsageError(f"--nodes: {pattern!r} has an unpaired bracket", "for example gpu[01-16]")
        return [pattern]
    # An IPv6 address in brackets is a host, not a range.
    if ":" in match.group(1):
        return [pattern]
    names = []
    for part in match.group(1).split(","):
        bounds = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if bounds is None:
            raise UsageError(f"--nodes: {part!r} in {pattern!r} is no number or range", "for example gpu[01-16]")
        first, last = bounds.group(1), bounds.group(2) or bounds.group(1)
        if int(last) < int(first) or int(last) - int(first) >= MOST_NODES:
            raise UsageError(f"--nodes: {part!r} in {pattern!r} runs backwards or is too long", "write gpu[01-16]")
        for number in range(int(first), int(last) + 1):
            names += expand(pattern[: match.start()] + str(number).zfill(len(first)) + pattern[match.end() :])
    return names


def read_inventory(path: str, group: str | None = None) -> tuple[Node, ...]:
    """Returns the hosts of an inventory, read by Ansible itself, so that its variables mean the same in both."""
    tool = shutil.which("ansible-inventory", path=str(Path(sys.executable).parent)) or shutil.which("ansible-inventory")
    if tool is None:
        raise UsageError("--inventory needs Ansible, which is not installed", "install it: pip install -e '.[nodes]'")
    if not Path(path).exists():
        raise UsageError(f"--inventory {path}: there is no such file", "see inventory/ for an example")
    command = [tool, "--inventory", path, "--list", *(["--limit", group] if group else [])]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=INVENTORY_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise UsageError(f"--inventory {path}: not read in {INVENTORY_TIMEOUT_S} s", "call ansible-inventory") from None
    if answer.returncode:
        reason = (answer.stderr.strip().splitlines() or ["ansible-inventory failed"])[-1]
        raise UsageError(f"--inventory {path}: {reason}", "check it with ansible-inventory --list")
    nodes = inventory_nodes(json.loads(answer.stdout))
    if not nodes:
        raise UsageError(f"--inventory {path}: no host matches {group or 'all'}", "check it with ansible-inventory")
    return nodes


def inventory_nodes(listing: Mapping[str, Any]) -> tuple[Node, ...]:
    """Returns the nodes in what `ansible-inventory --list` prints."""
    hostvars = listing.get("_meta", {}).get("hostvars", {})
    names: dict[str, None] = {}
    for group, content in listing.items():
        if group != "_meta":
            names.update(dict.fromkeys(content.get("hosts", [])))
    return tuple(_inventory_node(name, hostvars.get(name, {})) for name in names)


def _inventory_node(name: str, variables: Mapping[str, Any]) -> Node:
    options = ssh_options(" ".join(str(variables.get(f"ansible_ssh_{kind}_args", "")) for kind in ("common", "extra")))
    port = variables.get("ansible_port", variables.get("ansible_ssh_port"))
    return Node(
        name=name,
        host=str(variables.get("ansible_host", variables.get("ansible_ssh_host", name))),
        user=variables.get("ansible_user", variables.get("ansible_ssh_user")),
        port=None if port is None else int(port),
        key=variables.get("ansible_ssh_private_key_file", variables.get("ansible_private_key_file")),
        jump=options.get("proxyjump"),
        proxy_command=options.get("proxycommand"),
        known_hosts=options.get("userknownhostsfile"),
    )


def ssh_options(arguments: str) -> dict[str, str]:
    """Returns the options in ssh's command-line form: `-o Name=value`, `-J host`; names in lower case."""
    options: dict[str, str] = {}
    words = iter(shlex.split(arguments))
    for word in words:
        if word.startswith("-J"):
            options["proxyjump"] = word[2:] or next(words, "")
        elif word.startswith("-o"):
            match = re.match(r"\s*(\w+)\s*[=\s]\s*(.*)", word[2:] or next(words, ""))
            if match is not None:
                options[match.group(1).lower()] = match.group(2).strip()
    return options


def is_local(nodes: str | None) -> bool:
    """True when `--nodes` names this machine alone."""
    return nodes is None or nodes in LOCAL_NAMES


def _node(text: str) -> Node:
    match = re.fullmatch(r"(?:([^@\s]+)@)?(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9_.-]+)(?::(\d+))?", text)
    if match is None or text.startswith("-"):
        raise UsageError(f"--nodes: {text!r} is not a host", "write host, user@host or user@host:port")
    user, host, port = match.groups()
    return Node(name=text, host=host.strip("[]"), user=user, port=int(port) if port else None)


def _split(text: str) -> list[str]:
    """Splits at commas and spaces that are not inside brackets."""
    return [part for part in re.split(r"[,\s]+(?![^\[]*\])", text.strip()) if part]


def _read_file(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"--nodes @{path}: {error.strerror}", "name a file with one host a line") from None
    return [line.split("#", 1)[0].strip() for line in lines]


def _unique(nodes: Sequence[Node]) -> tuple[Node, ...]:
    names = [node.name for node in nodes]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"--nodes names {', '.join(twice)} more than once", "name each host once")
    return tuple(nodes)
