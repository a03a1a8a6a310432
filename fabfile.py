"""The fab tasks: parse, call launch, print. No logic, and no import of torch.

Exit codes: 0 ok, 1 failed, 2 usage or configuration, 3 preflight, 4 no capacity, 75 preempted, 130 interrupted.
"""

from __future__ import annotations

from invoke import Collection, Context, task

from launch.tasks import checkpoints, data, watching, weights
from launch.tasks.exits import exits_cleanly

_NODES_HELP = {
    "nodes": "where to train: a,b,c or gpu[01-16] or @file; left out: this machine, one rank a GPU, or 2 without a GPU",
    "inventory": "take the nodes from an Ansible inventory instead",
    "limit": "only this group or pattern of the inventory",
    "spares": "nodes that step in for those that fail",
    "port": "port of the rendezvous on the first node (default: a free one)",
    "python": "Python on the nodes (default: this one's path, else /opt/loopworks/venv, else python3)",
    "ssh-config": "ssh configuration file (default: ~/.ssh/config)",
    "config": "configuration file (default: config.yaml)",
    "set": "override one key, for example --set training.max_steps=1000; may be given several times",
}
_START_HELP = _NODES_HELP | {
    "min-nodes": "go on with so many when nodes fail and no spare is left (default: all)",
    "restarts": "how often the run may be started again after faults (default 3)",
    "hang-timeout": "seconds without a step after which a rank counts as hung (default 300)",
    "env": "NAME=VALUE for the ranks, over what is derived; may be given several times",
    "backend": "ssh (one torchrun a node) or mpirun",
}


@task(
    iterable=["set", "env"],
    optional=["resume"],
    help=_START_HELP
    | {
        "name": "name of the run and of its folder (default: date and time)",
        "resume": "go on with this run (without a value: the newest) from its newest checkpoint that verifies",
        "dry-run": "print the plan and what would run, then stop",
        "json": "print the plan (dry run) or the result as JSON and no progress",
    },
)
@exits_cleanly
def train(
    c: Context,
    nodes: str | None = None,
    inventory: str | None = None,
    limit: str | None = None,
    spares: str | None = None,
    min_nodes: int = 0,
    restarts: int = 3,
    hang_timeout: int = 300,
    port: int = 0,
    python: str | None = None,
    ssh_config: str | None = None,
    env: list[str] | None = None,
    backend: str = "ssh",
    config: str | None = None,
    set: list[str] | None = None,  # noqa: A002 (the flag's name)
    name: str | None = None,
    resume: str | bool | None = None,
    dry_run: bool = False,
    json: bool = False,
) -> None:
    """Train the model of a configuration, here or on nodes, or go on with a run."""
    from launch.cluster import ClusterRequest
    from launch.estimate import outlook
    from launch.present import Screen, print_json, print_plan
    from launch.request import TrainRequest
    from launch.start import prepare, start

    # A flag that may stand alone: --resume is the newest run.
    going_on = "" if resume is True else resume
    request = TrainRequest(config, tuple(set or ()), name, going_on, console=not json)
    cluster = ClusterRequest(
        nodes, inventory, limit, spares, min_nodes or None, restarts, hang_timeout, port or None, python, ssh_config,
        tuple(env or ()), backend,
    )  # fmt: skip
    prepared = prepare(request, cluster, dry_run)
    if dry_run:
        specs = prepared.specs("runs/NAME", console=not json)
        expected = outlook(prepared.config, prepared.plan, prepared.folder)
        if json:
            commands = [vars(spec) for spec in specs]
            print_json({"plan": prepared.plan.as_json(), "commands": commands, "expected": expected.as_json()})
        else:
            print_plan(prepared.plan, specs, expected)
        return
    if not json:
        print_plan(prepared.plan)
    result = start(request, cluster, prepared, Screen(quiet=json))
    if json:
        print_json(result)


@task(
    iterable=["set", "env"],
    optional=["resume"],
    help=_NODES_HELP
    | {
        "env": "NAME=VALUE for the ranks; may be given several times",
        "resume": "plan how this run (without a value: the newest) would go on",
        "stack": "AWS stack (dev, prod, or a Pulumi.STACK.yaml) whose cost is shown too",
        "json": "print JSON",
    },
)
@exits_cleanly
def plan(
    c: Context,
    nodes: str | None = None,
    inventory: str | None = None,
    limit: str | None = None,
    spares: str | None = None,
    port: int = 0,
    python: str | None = None,
    ssh_config: str | None = None,
    env: list[str] | None = None,
    config: str | None = None,
    set: list[str] | None = None,  # noqa: A002
    resume: str | bool | None = None,
    stack: str | None = None,
    json: bool = False,
) -> None:
    """Print what fab train would do: ranks, batch, memory, time, checkpoint, commands. Starts nothing."""
    from launch.cluster import ClusterRequest
    from launch.cost import stack_cost
    from launch.estimate import outlook
    from launch.present import print_cost, print_json, print_plan
    from launch.request import TrainRequest
    from launch.start import prepare

    cluster = ClusterRequest(
        nodes, inventory, limit, spares, port=port or None, python=python, ssh_config=ssh_config, env=tuple(env or ())
    )
    request = TrainRequest(config, tuple(set or ()), resume="" if resume is True else resume)
    prepared = prepare(request, cluster, dry_run=True)
    specs = prepared.specs("runs/NAME", console=not json)
    expected = outlook(prepared.config, prepared.plan, prepared.folder)
    cost = None if stack is None else stack_cost(stack)
    if json:
        commands = [vars(spec) for spec in specs]
        print_json(
            {"plan": prepared.plan.as_json(), "commands": commands, "expected": expected.as_json(), "cost": cost}
        )
        return
    print_plan(prepared.plan, specs, expected)
    if cost is not None:
        print_cost(cost)


@task(iterable=["set"], help=_NODES_HELP | {"json": "print JSON"})
@exits_cleanly
def preflight(
    c: Context,
    nodes: str | None = None,
    inventory: str | None = None,
    limit: str | None = None,
    spares: str | None = None,
    port: int = 0,
    python: str | None = None,
    ssh_config: str | None = None,
    config: str | None = None,
    set: list[str] | None = None,  # noqa: A002
    json: bool = False,
) -> int:
    """Look at every node before a run: all findings in one table. Exit code 3 when one fails."""
    from launch.cluster import ClusterRequest
    from launch.cluster import preflight as check_nodes
    from launch.present import print_findings, print_json
    from launch.request import TrainRequest

    cluster = ClusterRequest(nodes, inventory, limit, spares, port=port or None, python=python, ssh_config=ssh_config)
    report = check_nodes(TrainRequest(config, tuple(set or ())), cluster)
    if json:
        print_json(report.as_json())
    else:
        print_findings(report.findings)
    return report.exit_code


@task(help={"run": "name of the run (default: the newest)", "dir": "folder of the runs", "json": "print the result"})
@exits_cleanly
def attach(c: Context, run: str | None = None, dir: str = "runs", json: bool = False) -> None:  # noqa: A002
    """Follow a run on nodes again; starts its supervisor when that is gone."""
    from launch.present import Screen, print_json
    from launch.runs import find_run
    from launch.start import attach as attach_to

    result = attach_to(find_run(dir, run), Screen(quiet=json))
    if json:
        print_json(result)


@task(help={"run": "name of the run (default: the newest)", "dir": "folder of the runs", "json": "print the result"})
@exits_cleanly
def resume(c: Context, run: str | None = None, dir: str = "runs", json: bool = False) -> None:  # noqa: A002
    """Go on with a run that ended, where and as it was started, from its newest checkpoint that verifies."""
    from launch.present import Screen, print_json
    from launch.runs import find_run
    from launch.start import resume as resume_run

    result = resume_run(find_run(dir, run), Screen(quiet=json))
    if json:
        print_json(result)


@task(help={"dir": "folder of the runs", "json": "print JSON"})
@exits_cleanly
def status(c: Context, dir: str = "runs", json: bool = False) -> None:  # noqa: A002
    """List the runs: phase, step, loss, speed."""
    from launch.observe import status as run_status
    from launch.present import print_json, print_status

    rows = run_status(dir)
    if json:
        print_json(rows)
    else:
        print_status(rows)


@task(
    help={
        "run": "name of the run (default: the newest)",
        "follow": "go on until the run ends",
        "rank": "the log of one rank instead of the run's",
        "node": "what torchrun and the node agent said on one node",
        "dir": "folder of the runs",
    }
)
@exits_cleanly
def logs(
    c: Context,
    run: str | None = None,
    follow: bool = False,
    rank: str | None = None,
    node: str | None = None,
    dir: str = "runs",  # noqa: A002
) -> None:
    """Print the log of a run."""
    from launch.observe import follow as follow_log
    from launch.observe import log_file
    from launch.runs import find_run
    from launch.start import node_log

    folder = find_run(dir, run)
    if node is not None:
        print(node_log(folder, node), end="")
        return
    path = log_file(folder, rank)
    if follow:
        for line in follow_log(path, folder):
            print(line, end="", flush=True)
    elif path.exists():
        print(path.read_text(encoding="utf-8", errors="replace"), end="")


@task(help={"run": "name of the run (default: the newest)", "dir": "folder of the runs"})
@exits_cleanly
def stop(c: Context, run: str | None = None, dir: str = "runs") -> None:  # noqa: A002
    """Ask a run to save and leave; end what is left of it."""
    from launch.runs import find_run
    from launch.start import stop as stop_run

    print(stop_run(find_run(dir, run)))


@task(
    help={
        "run": "name of the run (default: the newest)",
        "prompt": "text to continue",
        "tokens": "how many tokens to write (default 100)",
        "recurrence": "core iterations a token (default: the model's mean)",
        "temperature": "0 takes the likeliest token; default 0.8",
        "exit": "stop iterating early: none, kl or latent",
        "seed": "seed of the sampling",
        "dir": "folder of the runs",
        "json": "print JSON",
    }
)
@exits_cleanly
def generate(
    c: Context,
    prompt: str,
    run: str | None = None,
    tokens: int = 100,
    recurrence: int = 0,
    temperature: float = 0.8,
    exit: str = "none",  # noqa: A002
    seed: int = 0,
    dir: str = "runs",  # noqa: A002
    json: bool = False,
) -> int:
    """Let the model of a run continue a prompt."""
    from launch.observe import generate as run_generate
    from launch.runs import find_run

    extra = ["--tokens", str(tokens), "--temperature", str(temperature), "--seed", str(seed), "--exit", exit]
    extra += ["--recurrence", str(recurrence)] if recurrence else []
    return run_generate(find_run(dir, run), prompt, extra + (["--json"] if json else []))


namespace = Collection(
    *(train, plan, preflight, attach, resume, status, logs, stop, generate),
    *(weights.export_weights, weights.import_weights, watching.monitor, watching.report),
)
namespace.add_collection(checkpoints.collection)
namespace.add_collection(data.collection)
