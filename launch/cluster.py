"""`fab train --nodes`: from what the user asked for to a run on many nodes that is decided but not started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launch.backends.base import LaunchSpec
from launch.backends.ssh import node_specs
from launch.errors import UsageError
from launch.machine import Gpu, MachineFacts
from launch.nodes import Node, parse_nodes, read_inventory
from launch.placement import excuse, place
from launch.plan import build_plan
from launch.preflight import Finding, PreflightError, Wanted, failed, judge
from launch.probe import Question, ask_facts, check_bandwidth, check_reach, meeting, remotes
from launch.remote import CHECKOUT, NODE_ROOT, checkout_files, content_hash
from launch.request import PreparedRun, TrainRequest, data_facts, dataset_directory, read_config
from launch.supervision import NODES_FILE, Settings, write
from training.config import RunConfig
from training.errors import EXIT_PREFLIGHT
from training.records import RunFolder

BACKENDS = ("ssh", "mpirun")
DEFAULT_RESTARTS = 3
DEFAULT_HANG_S = 300.0


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

    def remember(self, run: RunFolder) -> None:
        """Writes nodes.json."""
        super().remember(run)
        write(run.path / NODES_FILE, self.settings)

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


def prepare_cluster(request: TrainRequest, cluster: ClusterRequest, writes: bool = True) -> PreparedCluster:
    """Asks all nodes for their facts, checks them and plans the run.

    `writes` False (a dry run) leaves no trace, and so cannot tell whether the run folder is shared. Raises
    PreflightError with everything that is wrong with any node, UsageError and ConfigError.
    """
    nodes, spares = cluster.addresses()
    return _prepare(request, cluster, nodes, spares, cluster.environment(), most=len(nodes), writes=writes)


def prepare_again(request: TrainRequest, settings: Settings, writes: bool = True) -> PreparedCluster:
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
    return _prepare(request, cluster, nodes, spares, settings.env, settings.most_nodes, writes, going_on=True)


def _prepare(
    request: TrainRequest,
    cluster: ClusterRequest,
    nodes: Sequence[Node],
    spares: Sequence[Node],
    extra: Mapping[str, str],
    most: int,
    writes: bool,
    going_on: bool = False,
) -> PreparedCluster:
    config, folder = read_config(request)
    config = with_absolute_paths(config)
    dataset = dataset_directory(config)
    wanted = what_is_wanted(config, cluster)
    least = cluster.min_nodes or most
    with remotes([*nodes, *spares], cluster.ssh_config) as hosts:
        question = _question(wanted, cluster, writes)
        answers = ask_facts(hosts, question)
        where = place(nodes, spares, answers, wanted, least=least, most=most, going_on=going_on)
        by_name = {host.node.name: host for host in hosts}
        reach = check_reach([by_name[node.name] for node in where.nodes], answers, question) if writes else []
    asked = [*where.nodes, *(node for node in nodes if node.name in where.away)]
    findings = excuse(judge({node.name: answers[node.name] for node in asked}, wanted), where) + reach
    if failed(findings):
        raise PreflightError(findings)
    known = [*where.nodes, *where.spares]
    facts = {node.name: answer for node in known if isinstance(answer := answers[node.name], dict)}
    data = data_facts(config, dataset)
    plan = build_plan(config, [machine(node.name, facts[node.name]) for node in where.nodes], data)
    sent = config.data.mixture is None and config.data.path == "demo"
    settings = Settings(
        nodes=[asdict(node) for node in where.nodes],
        spares=[asdict(node) for node in where.spares],
        facts=facts,
        min_nodes=least,
        most_nodes=most,
        restarts=cluster.restarts,
        hang_s=cluster.hang_s,
        env=dict(extra),
        port=cluster.port,
        ssh_config=cluster.ssh_config,
        python=cluster.python,
        code=f"{NODE_ROOT}/code/{content_hash(CHECKOUT, checkout_files())}",
        data=None if data is None else asdict(data),
        dataset=f"{NODE_ROOT}/datasets/{dataset.name}-{_stamp(dataset)}" if sent else None,
        dataset_source=str(dataset.absolute()) if sent else None,
    )
    return PreparedCluster(
        config, plan, dataset, folder, resume=folder is not None, settings=settings, findings=findings
    )


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Returns the configuration with the folders of a mixture as seen from anywhere: nodes work in other folders."""
    if not config.data.mixture:
        return config
    mixture = {_absolute(path): weight for path, weight in config.data.mixture.items()}
    return config.model_copy(update={"data": config.data.model_copy(update={"mixture": mixture})})


def what_is_wanted(config: RunConfig, cluster: ClusterRequest) -> Wanted:
    """Returns what the nodes are compared with: the datasets in folders must be there on each; the demo is sent, and
    what is at s3:// each node fetches."""
    data = list(config.data.mixture) if config.data.mixture else [config.data.path]
    folders = tuple(_absolute(path) for path in data if path != "demo" and not path.startswith("s3://"))
    return Wanted(str(Path(config.run.dir).absolute()), folders, cluster.port)


def _absolute(path: str) -> str:
    return path if path.startswith("s3://") else str(Path(path).absolute())


def _question(wanted: Wanted, cluster: ClusterRequest, writes: bool, deep: bool = False) -> Question:
    shared = wanted.run_dir if writes else None
    return Question((wanted.run_dir, *wanted.data_paths), shared, cluster.port, cluster.python, deep)


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
    wanted = what_is_wanted(config, cluster)
    question = _question(wanted, cluster, writes=True, deep=True)
    with remotes([*nodes, *spares], cluster.ssh_config) as hosts:
        answers = ask_facts(hosts, question)
        least = cluster.min_nodes or len(nodes)
        where = place(nodes, spares, answers, wanted, least=least, most=len(nodes))
        findings = excuse(judge(answers, wanted, deep=True), where) + check_reach(hosts, answers, question)
        # Without a connection it could only wait.
        return Report(findings if failed(findings) else findings + check_bandwidth(hosts, answers, question))


def machine(name: str, facts: Mapping[str, Any]) -> MachineFacts:
    """Returns the plan's facts of a node from what it answered."""
    values = dict(facts["machine"])
    cards = tuple(Gpu(g["name"], g["memory_bytes"], tuple(g["compute_capability"])) for g in values.pop("gpus"))
    return MachineFacts(**{**values, "name": name, "gpus": cards})


def _stamp(dataset: Path) -> str:
    """Returns a short hash of a dataset: its manifest has the hashes of all files. "new" before it is prepared."""
    manifest = dataset / "manifest.json"
    return content_hash(dataset, [manifest]) if manifest.is_file() else "new"
