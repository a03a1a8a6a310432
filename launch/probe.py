"""Asks all nodes at once: their facts, whether they reach each other, how fast they sum a tensor together."""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.backends.ssh import Meeting
from launch.errors import UsageError
from launch.nodes import Node
from launch.preflight import Finding
from launch.remote import CHECKOUT, NODE_ROOT, call, checkout_files, content_hash, pack, send, shell_path
from launch.ssh import HostError, Outcome, Remote, on_all

FACTS_TIMEOUT_S = 30.0
DEEP_TIMEOUT_S = 90.0
BANDWIDTH_TIMEOUT_S = 90


@dataclass(frozen=True)
class Question:
    """What is asked of every node. `run_dir` is the folder of which is asked whether all see the same one, None not to
    ask (it takes a file in it)."""

    paths: tuple[str, ...]
    run_dir: str | None = None
    port: int | None = None
    python: str | None = None
    deep: bool = False


def meeting(first: Mapping[str, Any], port: int | None, ports: Sequence[int] | None = None) -> Meeting:
    """Returns where ranks and agents meet: at the address under which the first node is reached."""
    offered = list(ports or first["ports"])
    return Meeting(first["address"], port or offered[0], offered[1])


def check_reach(
    hosts: Sequence[Remote], answers: Mapping[str, Any], question: Question, seconds: float = 6.0
) -> list[Finding]:
    """Every node reaches the port on the first node where the ranks are to meet."""
    able = [host for host in hosts if isinstance(answers[host.node.name], dict)]
    if len(able) < 2:
        return []
    first = answers[able[0].node.name]
    place = meeting(first, question.port)
    listen = {"port": place.master_port, "seconds": seconds, "callers": len(able) - 1}
    knock = {"address": place.address, "port": place.master_port, "seconds": seconds}

    def act(host: Remote) -> dict[str, Any]:
        function, arguments = ("listen_once", listen) if host is able[0] else ("reach", knock)
        return call(host, question.python, function, arguments, seconds + FACTS_TIMEOUT_S)

    found = []
    # All at once: the first one listens while the others knock.
    for name, answer in on_all(able, act, pool_size=len(able)).items():
        if name == able[0].node.name:
            continue
        where = f"{place.address}:{place.master_port} on {able[0].node.name}"
        if isinstance(answer, HostError):
            found.append(Finding("rendezvous", name, "fail", answer.cause, answer.remedy))
        elif not answer["reached"]:
            remedy = "open the ports between the nodes (security group, firewall), or choose one with --port"
            found.append(Finding("rendezvous", name, "fail", f"cannot reach {where}: {answer['reason']}", remedy))
        else:
            found.append(Finding("rendezvous", name, "ok", f"reaches {where}"))
    return found


def check_bandwidth(hosts: Sequence[Remote], answers: Mapping[str, Any], question: Question) -> list[Finding]:
    """All nodes together sum a tensor over the network that training will use; says how fast."""
    able = [host for host in hosts if isinstance(answers[host.node.name], dict)]
    if len(able) < 2:
        return []
    facts = {host.node.name: answers[host.node.name] for host in able}
    code = f"{NODE_ROOT}/code/{content_hash(CHECKOUT, checkout_files())}"
    archive = pack(CHECKOUT, checkout_files())
    first = able[0].node.name
    place = meeting(facts[first], question.port)

    def act(host: Remote) -> Outcome:
        if host.run(f"[ -d {shell_path(code)} ]").code:
            send(host, archive, code)
        fact = facts[host.node.name]
        variables = {"RANK": str(able.index(host)), "WORLD_SIZE": str(len(able)), "MASTER_ADDR": place.address}
        variables |= {"MASTER_PORT": str(place.master_port), "OMP_NUM_THREADS": "1"}
        if fact["interface"]:
            variables |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), fact["interface"])
        words = [f"{name}={value}" for name, value in variables.items()]
        command = shlex.join(["env", *words, fact["python"], "-m", "training.bandwidth"])
        return host.run(f"cd {shell_path(code)} && exec timeout {BANDWIDTH_TIMEOUT_S} {command}", timeout_s=180)

    outcomes = on_all(able, act, pool_size=len(able))
    bad = {name: o for name, o in outcomes.items() if isinstance(o, HostError) or o.code}
    remedy = "see that the nodes reach each other on all ports (security group, firewall, interface names)"
    if bad:
        return [
            Finding("all-reduce", name, "fail", o.cause if isinstance(o, HostError) else o.reason, remedy)
            for name, o in bad.items()
        ]
    lead = outcomes[first]
    assert isinstance(lead, Outcome)
    measured = json.loads(lead.text.strip().splitlines()[-1])
    rate = f"{measured['bytes_per_s'] / 1e9:.2f} GB/s by {measured['backend']} over {len(able)} nodes"
    return [Finding("all-reduce", first, "ok", rate)]


@contextlib.contextmanager
def remotes(nodes: Iterable[Node], ssh_config: str | None) -> Iterator[list[Remote]]:
    """Inside the block the hosts can be used; afterwards no connection is left."""
    hosts = [Remote(node, ssh_config) for node in nodes]
    try:
        yield hosts
    finally:
        for host in hosts:
            host.close()


def ask_facts(hosts: Sequence[Remote], question: Question) -> dict[str, dict[str, Any] | HostError]:
    """Returns the facts of all hosts (launch/node_facts.py), or why there are none."""

    def ask(host: Remote) -> dict[str, Any]:
        host.run("true", timeout_s=FACTS_TIMEOUT_S)  # connects: what follows measures the clock
        began = time.time()
        request = {"paths": list(question.paths), "token": token, "port": question.port, "deep": question.deep}
        limit = DEEP_TIMEOUT_S if question.deep else FACTS_TIMEOUT_S
        facts = call(host, question.python, "collect", request, limit)
        ended = time.time()
        # The node's clock was read between the two; what is outside of that is certainly off.
        facts["clock_offset_s"] = min(0.0, facts["clock"] - began) + max(0.0, facts["clock"] - ended)
        return facts

    with _token(question.run_dir) as token:
        return on_all(hosts, ask)


@contextlib.contextmanager
def _token(folder: str | None) -> Iterator[str | None]:
    """A file that exists inside the block only: who sees it sees the same folder."""
    if folder is None:
        yield None
        return
    path = Path(folder) / f".shared-{secrets.token_hex(8)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise UsageError(
            f"cannot write {folder}: {error.strerror}", "choose another place with --set run.dir=PATH"
        ) from None
    try:
        yield str(path)
    finally:
        path.unlink(missing_ok=True)
