"""`fab train --nodes`: from what the user asked for to a run on many nodes that is decided but not started."""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launch.backends.base import LaunchSpec
from launch.backends.ssh import Meeting, node_specs
from launch.errors import UsageError
from launch.machine import Gpu, MachineFacts
from launch.nodes import Node, parse_nodes, read_inventory
from launch.plan import build_plan
from launch.preflight import Finding, PreflightError, Wanted, failed, judge
from launch.remote import CHECKOUT, NODE_ROOT, call, checkout_files, content_hash, pack, send, shell_path
from launch.request import PreparedRun, TrainRequest, dataset_directory, dataset_facts, read_config
from launch.ssh import HostError, Outcome, Remote, on_all
from launch.supervision import Settings
from training.errors import EXIT_PREFLIGHT

BACKENDS = ("ssh", "mpirun")
DEFAULT_RESTARTS = 3
DEFAULT_HANG_S = 300.0
FACTS_TIMEOUT_S = 30.0
DEEP_TIMEOUT_S = 90.0
BANDWIDTH_TIMEOUT_S = 90


@dataclass(frozen=True)
class ClusterRequest:
    """Where to train, and what to do when nodes fail."""

    nodes: str | None = None
    inventory: str | None = None
    limit: str | None = None
    spares: str | None = None
    min_nodes: int | None = None
    restarts: int = DEFAULT_RESTARTS
    hang_s: float = DEFAULT_HANG_S
    port: int | None = None
    python: str | None = None
    ssh_config: str | None = None
    env: tuple[str, ...] = ()
    backend: str = "ssh"

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise UsageError(f"--backend {self.backend}: not one of {', '.join(BACKENDS)}", "choose one of those")

    def addresses(self) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
        """Returns the nodes and the spares. Raises UsageError."""
        if self.nodes and self.inventory:
            raise UsageError("--nodes and --inventory are both given", "keep one of them")
        nodes = read_inventory(self.inventory, self.limit) if self.inventory else parse_nodes(self.nodes or "")
        spares = parse_nodes(self.spares) if self.spares else ()
        known = {node.name for node in nodes}
        return nodes, tuple(node for node in spares if node.name not in known)

    def environment(self) -> dict[str, str]:
        """Returns the variables of --env KEY=VALUE. Raises UsageError."""
        pairs = [item.partition("=") for item in self.env]
        for name, separator, _ in pairs:
            if not separator or not name.replace("_", "a").isalnum():
                raise UsageError(f"--env {name}: not of the form NAME=VALUE", "for example --env NCCL_DEBUG=INFO")
        return {name: value for name, _, value in pairs}


@dataclass(frozen=True)
class PreparedCluster(PreparedRun):
    """A run on nodes that is decided but not started."""

    settings: Settings = field(kw_only=True)
    findings: list[Finding] = field(kw_only=True, default_factory=list)

    def plan_file(self) -> dict[str, Any]:
        """Returns what plan.json holds; a demo dataset has the place where it is sent."""
        place = super().plan_file()
        if self.settings.dataset is not None:
            home = self.settings.facts[self.plan.nodes[0].name]["home"]
            place["dataset_dir"] = self.settings.dataset.replace("~", home, 1)
        return place

    def code_folder(self) -> str:
        """Returns where the checkout lies on the first node."""
        return self.settings.code.replace("~", self.settings.facts[self.plan.nodes[0].name]["home"], 1)

    def specs(self, run_dir: str, console: bool) -> list[LaunchSpec]:
        """Returns what would run on each node."""
        settings = self.settings
        first = settings.facts[self.plan.nodes[0].name]
        return node_specs(
            self.plan, settings.facts, meeting(first, settings.port), run_dir, settings.code, settings.env
        )


def meeting(first: Mapping[str, Any], port: int | None, ports: Sequence[int] | None = None) -> Meeting:
    """Returns where ranks and agents meet: at the address under which the first node is reached."""
    offered = list(ports or first["ports"])
    return Meeting(first["address"], port or offered[0], offered[1])


def prepare_cluster(request: TrainRequest, cluster: ClusterRequest, writes: bool = True) -> PreparedCluster:
    """Asks all nodes for their facts, checks them and plans the run.

    `writes` False (a dry run) leaves no trace, and so cannot tell whether the run folder is shared. Raises
    PreflightError with everything that is wrong with any node, UsageError and ConfigError.
    """
    return _prepare(request, cluster, *cluster.addresses(), cluster.environment(), writes)


def prepare_again(request: TrainRequest, settings: Settings) -> PreparedCluster:
    """The same for a run that goes on: nodes and options are those that nodes.json has."""
    cluster = ClusterRequest(
        min_nodes=settings.min_nodes,
        restarts=settings.restarts,
        hang_s=settings.hang_s,
        port=settings.port,
        python=settings.python,
        ssh_config=settings.ssh_config,
    )
    nodes, spares = (tuple(Node(**item) for item in items) for items in (settings.nodes, settings.spares))
    return _prepare(request, cluster, nodes, spares, settings.env, writes=True)


def _prepare(
    request: TrainRequest,
    cluster: ClusterRequest,
    nodes: Sequence[Node],
    spares: Sequence[Node],
    extra: Mapping[str, str],
    writes: bool,
) -> PreparedCluster:
    config, folder = read_config(request)
    if config.data.mixture is not None or config.data.path.startswith("s3://"):
        raise UsageError(
            "data: mixtures and datasets at s3:// are read on one machine only in this version",
            "prepare one dataset, put it where all nodes see it, and name it in data.path",
        )
    dataset = dataset_directory(config)
    run_dir = str(Path(config.run.dir).absolute())
    data_path = None if config.data.path == "demo" else str(dataset.absolute())
    with remotes([*nodes, *spares], cluster.ssh_config) as hosts:
        answers = ask_facts(
            hosts, cluster, [path for path in (run_dir, data_path) if path], run_dir if writes else None
        )
        reach = check_reach(hosts[: len(nodes)], answers, cluster) if writes else []
    wanted = Wanted(run_dir, data_path, cluster.port)
    findings = judge({node.name: answers[node.name] for node in nodes}, wanted) + reach
    if failed(findings):
        raise PreflightError(findings)
    usable = _usable_spares(spares, answers, nodes, wanted)
    facts = {node.name: answer for node in [*nodes, *usable] if isinstance(answer := answers[node.name], dict)}
    plan = build_plan(config, [machine(node.name, facts[node.name]) for node in nodes], dataset_facts(dataset))
    code = f"{NODE_ROOT}/code/{content_hash(CHECKOUT, checkout_files())}"
    settings = Settings(
        nodes=[asdict(node) for node in nodes],
        spares=[asdict(node) for node in usable],
        facts=facts,
        min_nodes=cluster.min_nodes or len(nodes),
        restarts=cluster.restarts,
        hang_s=cluster.hang_s,
        env=dict(extra),
        port=cluster.port,
        ssh_config=cluster.ssh_config,
        python=cluster.python,
        code=code,
        dataset=f"{NODE_ROOT}/datasets/{dataset.name}-{_stamp(dataset)}" if data_path is None else None,
        dataset_source=str(dataset.absolute()) if data_path is None else None,
    )
    return PreparedCluster(
        config, plan, dataset, folder, resume=folder is not None, settings=settings, findings=findings
    )


@dataclass(frozen=True)
class Report:
    """What a preflight found."""

    findings: list[Finding]

    @property
    def exit_code(self) -> int:
        """0, or 3 when a finding forbids a run."""
        return EXIT_PREFLIGHT if failed(self.findings) else 0

    def as_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return {"ok": not failed(self.findings), "findings": [asdict(finding) for finding in self.findings]}


def preflight(request: TrainRequest, cluster: ClusterRequest) -> Report:
    """Does every check on every node, in parallel, and returns all findings."""
    nodes, spares = cluster.addresses()
    config, _ = read_config(request)
    run_dir = str(Path(config.run.dir).absolute())
    data_path = None if config.data.path == "demo" else str(Path(config.data.path).absolute())
    everyone = [*nodes, *spares]
    with remotes(everyone, cluster.ssh_config) as hosts:
        answers = ask_facts(hosts, cluster, [p for p in (run_dir, data_path) if p], run_dir, deep=True)
        findings = judge(answers, Wanted(run_dir, data_path, cluster.port), deep=True)
        findings += check_reach(hosts, answers, cluster)
        # Without a connection it could only wait.
        return Report(findings if failed(findings) else findings + check_bandwidth(hosts, answers, cluster))


def check_reach(
    hosts: Sequence[Remote], answers: Mapping[str, Any], cluster: ClusterRequest, seconds: float = 6.0
) -> list[Finding]:
    """Every node reaches the port on the first node where the ranks are to meet."""
    able = [host for host in hosts if isinstance(answers[host.node.name], dict)]
    if len(able) < 2:
        return []
    first = answers[able[0].node.name]
    place = meeting(first, cluster.port)
    listen = {"port": place.master_port, "seconds": seconds, "callers": len(able) - 1}
    knock = {"address": place.address, "port": place.master_port, "seconds": seconds}

    def act(host: Remote) -> dict[str, Any]:
        function, arguments = ("listen_once", listen) if host is able[0] else ("reach", knock)
        return call(host, cluster.python, function, arguments, seconds + FACTS_TIMEOUT_S)

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


def check_bandwidth(hosts: Sequence[Remote], answers: Mapping[str, Any], cluster: ClusterRequest) -> list[Finding]:
    """All nodes together sum a tensor over the network that training will use; says how fast."""
    able = [host for host in hosts if isinstance(answers[host.node.name], dict)]
    if len(able) < 2:
        return []
    facts = {host.node.name: answers[host.node.name] for host in able}
    code = f"{NODE_ROOT}/code/{content_hash(CHECKOUT, checkout_files())}"
    archive = pack(CHECKOUT, checkout_files())
    first = able[0].node.name
    place = meeting(facts[first], cluster.port)

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


def ask_facts(
    hosts: Sequence[Remote],
    cluster: ClusterRequest,
    paths: Sequence[str],
    shared: str | None,
    deep: bool = False,
) -> dict[str, dict[str, Any] | HostError]:
    """Returns the facts of all hosts; `shared` is a folder of which is asked whether they see the same one."""

    def ask(host: Remote) -> dict[str, Any]:
        host.run("true", timeout_s=FACTS_TIMEOUT_S)  # connects: what follows measures the clock
        began = time.time()
        request = {"paths": list(paths), "token": token, "port": cluster.port, "deep": deep}
        facts = call(host, cluster.python, "collect", request, DEEP_TIMEOUT_S if deep else FACTS_TIMEOUT_S)
        ended = time.time()
        # The node's clock was read between the two; what is outside of that is certainly off.
        facts["clock_offset_s"] = min(0.0, facts["clock"] - began) + max(0.0, facts["clock"] - ended)
        return facts

    with _token(shared) as token:
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


def _usable_spares(
    spares: Sequence[Node], answers: Mapping[str, Any], nodes: Sequence[Node], wanted: Wanted
) -> list[Node]:
    """A spare with a fault is no reason not to start: it is left out."""
    found = judge({node.name: answers[node.name] for node in [*nodes, *spares]}, wanted)
    bad = {finding.node for finding in found if finding.level == "fail"}
    return [node for node in spares if node.name not in bad]


def machine(name: str, facts: Mapping[str, Any]) -> MachineFacts:
    """Returns the plan's facts of a node from what it answered."""
    values = dict(facts["machine"])
    cards = tuple(Gpu(g["name"], g["memory_bytes"], tuple(g["compute_capability"])) for g in values.pop("gpus"))
    return MachineFacts(**{**values, "name": name, "gpus": cards})


def _stamp(dataset: Path) -> str:
    """Returns a short hash of a dataset: its manifest has the hashes of all files. "new" before it is prepared."""
    manifest = dataset / "manifest.json"
    return content_hash(dataset, [manifest]) if manifest.is_file() else "new"
