"""What the control side does on a node: run a function there, send a folder once, start and end a run's agent.

The commands are built by pure functions; values never stand on a command line, they go by standard input.
"""

from __future__ import annotations

import hashlib
import io
import json
import shlex
import sys
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from launch.ssh import COMMAND_TIMEOUT_S, HostError, Outcome, Remote

CHECKOUT = Path(__file__).resolve().parent.parent
# Where everything of ours lies on a node, below the user's home.
NODE_ROOT = "~/.loopworks"
INSTALLED_PYTHON = "/opt/loopworks/venv/bin/python"
SENT = ("launch", "training")
# In the order in which they need each other; packages come empty.
FACT_MODULES = ("launch", "training", "training.drain", "launch.machine", "launch.node_facts")
SEND_TIMEOUT_S = 600.0

# Runs on the node: makes modules of the sources it is sent and calls one function with values, all as JSON.
_BOOT = """
import json, sys, types
request = json.load(sys.stdin)
for name, source in request["modules"]:
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
function = getattr(sys.modules[request["module"]], request["function"])
print(json.dumps(function(request["arguments"])))
"""


def python_command(pythons: Iterable[str], code: str) -> str:
    """Returns a shell command that runs `code` with the first of `pythons` that the node has."""
    names = " ".join(shlex.quote(name) for name in pythons)
    missing = "echo 'no Python found of: '%s >&2; exit 127" % names  # noqa: UP031 (quotes of the shell)
    return f'for p in {names}; do command -v "$p" >/dev/null && exec "$p" -c {shlex.quote(code)}; done; {missing}'


def pythons(wanted: str | None) -> tuple[str, ...]:
    """Returns where to look for the node's Python: the one asked for, or ours, /opt/loopworks and the system's."""
    return (wanted,) if wanted else (sys.executable, INSTALLED_PYTHON, "python3")


def call(
    remote: Remote, python: str | None, function: str, arguments: dict[str, Any], timeout_s: float = COMMAND_TIMEOUT_S
) -> dict[str, Any]:
    """Calls a function of launch/node_facts.py on the node and returns its answer. Raises HostError."""
    sources = [(name, _source(name)) for name in FACT_MODULES]
    request = {"modules": sources, "module": "launch.node_facts", "function": function, "arguments": arguments}
    outcome = remote.run(python_command(pythons(python), _BOOT), json.dumps(request).encode(), timeout_s)
    if outcome.code == 127:
        raise HostError(remote.node.name, "command", outcome.reason, "name one with --python /path/to/python")
    if outcome.code:
        raise HostError(remote.node.name, "command", f"the facts could not be read: {outcome.reason}")
    # A login script may have printed something before.
    answer: dict[str, Any] = json.loads(outcome.text.strip().splitlines()[-1])
    return answer


def checkout_files(checkout: Path = CHECKOUT) -> list[Path]:
    """Returns the files that a node needs: the packages, without caches."""
    found = [path for name in SENT for path in (checkout / name).rglob("*")]
    return sorted(
        path
        for path in found
        if path.is_file() and not any(p.startswith((".", "__pycache__")) for p in path.parts[-4:])
    )


def folder_files(folder: Path) -> list[Path]:
    """Returns all files of a folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def content_hash(root: Path, files: Iterable[Path]) -> str:
    """Returns a hash of names and contents; the same files have the same hash on every machine."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:20]


def pack(root: Path, files: Iterable[Path]) -> bytes:
    """Returns the files as a compressed tar; owner and time are left out, so equal files pack to equal bytes."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz", compresslevel=1) as archive:
        for path in files:
            member = archive.gettarinfo(str(path), path.relative_to(root).as_posix())
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime = 0
            with path.open("rb") as file:
                archive.addfile(member, file)
    return target.getvalue()


def unpack_command(target: str) -> str:
    """Returns the shell command that unpacks a tar from standard input into `target`, whole or not at all."""
    where = shell_path(target)
    # Two senders at once are no harm: each unpacks beside, and the first to rename wins.
    return (
        f'set -e; t={where}; if [ -d "$t" ]; then cat >/dev/null; exit 0; fi; umask 077; mkdir -p "$(dirname "$t")"; '
        'n=$(mktemp -d "$t.XXXXXX"); tar -xzf - -C "$n"; mv -T "$n" "$t" 2>/dev/null || { rm -rf "$n"; [ -d "$t" ]; }'
    )


def shell_path(path: str) -> str:
    """Quotes a path for the shell; a leading ~ is the home folder."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


def send(remote: Remote, archive: bytes, target: str) -> None:
    """Puts the files of `archive` into `target` on the node, once. Raises HostError."""
    outcome = remote.run(unpack_command(target), archive, SEND_TIMEOUT_S)
    if outcome.code:
        raise _cannot(remote, f"write {target}", outcome, "correct the permissions there")


def _cannot(remote: Remote, what: str, outcome: Outcome, remedy: str = "") -> HostError:
    """Returns the error for a command that failed; a full disk has a kind of its own, since trying again is no use."""
    name = remote.node.name
    if b"No space left on device" in outcome.errors:
        return HostError(name, "disk_full", f"cannot {what}: its disk is full", f"free space for {NODE_ROOT} there")
    return HostError(name, "command", f"cannot {what}: {outcome.reason}", remedy)


def ensure(remote: Remote, wanted: Mapping[str, Path]) -> None:
    """Sends what is missing: for each target a folder, or an archive that is already packed. Raises HostError."""
    for target, source in wanted.items():
        if remote.run(f"[ -d {shell_path(target)} ]").code:
            send(remote, pack(source, folder_files(source)) if source.is_dir() else source.read_bytes(), target)


def agent_command(python: str, code: str, action: str, folder: str, run: str) -> str:
    """Returns the shell command for `launch.agent`; `run` leaves it running in a session of its own."""
    where = f"cd {shlex.quote(code)} && export PYTHONPATH={shlex.quote(code)}"
    call_agent = f"{shlex.quote(python)} -m launch.agent {action} {shlex.quote(folder)}"
    if action != "run":
        return f"{where} && exec {call_agent} {shlex.quote(run)}"
    # The session may drop: own session id, no stream of ours stays open. The variable makes the agent one of the
    # run's processes, which are found and ended together.
    keep = f"(umask 077; mkdir -p {shlex.quote(folder)} && cat >{shlex.quote(folder + '/spec.json')})"
    log = shlex.quote(folder + "/agent.log")
    start = f"LOOPWORKS_RUN={shlex.quote(run)} setsid {call_agent} </dev/null >>{log} 2>&1 &"
    return f"{keep} && {where} && {{ {start} }}"


def start_agent(remote: Remote, python: str, code: str, folder: str, spec: dict[str, Any]) -> None:
    """Starts a node's part of the run. Raises HostError."""
    command = agent_command(python, code, "run", folder, spec["run"])
    outcome = remote.run(command, json.dumps(spec).encode())
    if outcome.code:
        raise _cannot(remote, "start the run", outcome)


def ask_agent(
    remote: Remote, python: str, code: str, action: str, folder: str, run: str, timeout_s: float
) -> dict[str, Any]:
    """Calls the agent's `stop` or `end` on the node and returns its answer. Raises HostError."""
    outcome = remote.run(agent_command(python, code, action, folder, run), timeout_s=timeout_s)
    if outcome.code:
        raise HostError(remote.node.name, "command", f"{action} failed: {outcome.reason}")
    answer: dict[str, Any] = json.loads(outcome.text.strip().splitlines()[-1])
    return answer


def _source(name: str) -> str:
    return (CHECKOUT / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8") if "." in name else ""
