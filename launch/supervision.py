"""How a run on nodes is watched: what is known of it (files in the run folder) and what follows from that. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from launch.errors import RunFailedError
from launch.nodes import Node
from training.errors import EXIT_CONFIG, EXIT_NO_CAPACITY, EXIT_PREEMPTED
from training.records import RankError, Record, RunFolder, RunState

# In the folder of a run on nodes, and of one under mpirun: where it runs and what was asked for.
NODES_FILE, MPIRUN_FILE = "nodes.json", "mpirun.json"
# A node blamed so often is left out.
BLAME_LIMIT = 2
# What the reason begins with when a node is left because of its drain mark (training/preemption.py).
DRAINED = "drained: "


class Settings(Record):
    """nodes.json: what the user asked for and what was found, for the whole run."""

    nodes: list[dict[str, Any]] = Field(description="Nodes of the first attempt.")
    spares: list[dict[str, Any]] = Field(default_factory=list)
    facts: dict[str, dict[str, Any]]
    min_nodes: int
    most_nodes: int = Field(description="So many nodes were asked for; no attempt has more.")
    restarts: int
    hang_s: float
    env: dict[str, str] = Field(default_factory=dict)
    port: int | None = None
    ssh_config: str | None = None
    python: str | None = None
    code: str = Field(description="Folder of the checkout on the nodes, ~ for the home folder.")
    data: dict[str, int] | None = Field(None, description="What the plan knows of the data (launch/plan.py).")
    dataset: str | None = Field(None, description="Folder on the nodes of a dataset that was sent there.")
    dataset_source: str | None = None

    def sources(self, code: Path) -> dict[str, Path]:
        """Returns what has to be on a node, target folder to source; `code` is the packed checkout."""
        found = {self.code: code}
        if self.dataset is not None and self.dataset_source is not None:
            found[self.dataset] = Path(self.dataset_source)
        return found

    def node(self, name: str) -> Node:
        """Returns how to reach a node."""
        return next(Node(**item) for item in [*self.nodes, *self.spares] if item["name"] == name)


class MpirunSettings(Record):
    """mpirun.json: the same for a run under mpirun."""

    cluster: Settings | None = Field(None, description="None for a run on one machine.")
    restarts: int
    port: int | None = None
    env: dict[str, str] = Field(default_factory=dict)


class Watch(Record):
    """supervision.json: where the supervisor is."""

    pid: int
    start: float
    attempt: int = 0
    active: list[str] = Field(default_factory=list, description="Nodes of the present attempt, the first one leads.")
    phase: Literal["preparing", "running", "ended"] = "preparing"
    blame: dict[str, int] = Field(default_factory=dict)
    left: dict[str, str] = Field(default_factory=dict, description="Nodes that were left, and why.")
    restarts: int = 0
    message: str = ""
    code: int | None = Field(None, description="Exit code of the run, once it has ended.")
    remedy: str = ""


class NodeState(Record):
    """nodes/NAME.json, written by the node's agent."""

    node: str
    attempt: int
    phase: Literal["running", "ended"]
    code: int | None = None
    reason: str = ""
    time: float
    ranks: list[dict[str, Any]] = Field(default_factory=list)
    leaving: str = ""

    @property
    def reason_to_leave(self) -> str:
        """Why the run has to go on without this node, as a rank or the agent has noticed; empty when it need not."""
        shutdown = self.leaving if self.code == EXIT_PREEMPTED else ""
        return next((beat["leaving"] for beat in self.ranks if beat.get("leaving")), shutdown)


class Decision(Record):
    """What follows when the ranks of an attempt are gone."""

    kind: Literal["finished", "stopped", "failed", "smaller", "restart", "leave"]
    reason: str = ""
    blame: list[str] = Field(default_factory=list)
    code: int = 0
    remedy: str = ""


def judge(
    state: RunState, has_result: bool, errors: Sequence[RankError], nodes: Mapping[str, NodeState], lost: Sequence[str]
) -> Decision:
    """Decides what follows from how an attempt ended. `lost`: nodes of which nothing is heard any more."""
    codes = [nodes[name].code for name in nodes if nodes[name].phase == "ended"]
    if has_result and state.phase == "finished" and all(code == 0 for code in codes):
        return Decision(kind="finished")
    if state.phase == "stopped":
        leaving = [f"{name}: {node.reason_to_leave}" for name, node in nodes.items() if node.reason_to_leave]
        return Decision(kind="leave" if leaving else "stopped", reason="; ".join(leaving) or state.message)
    first = errors[0] if errors else None
    if any(error.kind == "out_of_memory" for error in errors):
        return Decision(kind="smaller", reason="out of memory")
    # What only the user can mend comes again at each start.
    if first is not None and first.expected and first.exit_code == EXIT_CONFIG:
        return Decision(
            kind="failed", reason=f"rank {first.rank}: {first.cause}", code=first.exit_code, remedy=first.remedy
        )
    reason, blame = _first_cause(first, nodes, lost)
    return Decision(kind="restart", reason=reason, blame=blame)


def is_echo(error: RankError) -> bool:
    """True when a rank only says that another one is gone."""
    return not error.expected and "connection" in error.cause.lower()


def _first_cause(first: RankError | None, nodes: Mapping[str, NodeState], lost: Sequence[str]) -> tuple[str, list[str]]:
    """Names what went wrong first and on which nodes; a connection that broke is only the echo of a node that died."""
    if lost:
        return f"lost {', '.join(lost)}", list(lost)
    places = {beat["rank"]: name for name, node in nodes.items() for beat in node.ranks}
    for node in nodes.values():
        if node.reason.startswith("hang: rank "):
            rank = int(node.reason.split()[2])
            return node.reason, [places[rank]] if rank in places else []
    died = [(beat["rank"], name) for name, node in nodes.items() for beat in node.ranks if beat["phase"] != "ended"]
    # A rank that left no message was killed from outside; the others tell of its silence.
    said = {error.rank for error in ([first] if first else [])}
    silent = [(rank, name) for rank, name in died if rank not in said]
    if first is not None and not first.expected and not is_echo(first):
        return f"rank {first.rank}: {first.cause}", [places[first.rank]] if first.rank in places else []
    if silent:
        rank, name = silent[0]
        return f"rank {rank} on {name} died without a message (killed from outside?)", [name]
    reasons = [f"{name}: {node.reason}" for name, node in nodes.items() if node.reason]
    return (reasons[0] if reasons else "the ranks ended without a word"), []


def nodes_left(
    before: Mapping[str, str], nodes: Mapping[str, NodeState], drained: Mapping[str, str | None]
) -> dict[str, str]:
    """Returns the nodes that the next attempt does without, and why: those whose agents say so in this attempt, those
    of which it was said before, and those that have a drain mark now (`drained`: what each node that answered has).

    A node that was drained and has no mark any more can be used again; one that was taken away cannot.
    """
    now = {name: node.reason_to_leave for name, node in nodes.items() if node.reason_to_leave}
    back = [name for name, why in before.items() if why.startswith(DRAINED) and drained.get(name, why) is None]
    marked = {name: f"{DRAINED}{why}" for name, why in drained.items() if why is not None}
    return {name: why for name, why in {**before, **now, **marked}.items() if name not in back or name in now}


def choose(
    settings: Settings, usable: Sequence[str], blame: Mapping[str, int], left: Mapping[str, str] | None = None
) -> list[str]:
    """Returns the nodes of the next attempt: those that answer, spares for those that do not, not those `left`.

    Raises RunFailedError (no capacity) when fewer than `min_nodes` remain.
    """
    left = left or {}
    order = [item["name"] for item in [*settings.nodes, *settings.spares]]
    blamed = [name for name in order if blame.get(name, 0) >= BLAME_LIMIT]
    chosen = [name for name in order if name in usable and name not in (*blamed, *left)][: settings.most_nodes]
    if len(chosen) < settings.min_nodes:
        away = [name for name in order if name not in usable and name not in (*blamed, *left)]
        parts = [f"{len(chosen)} node(s) are left, {settings.min_nodes} are needed"]
        parts += [f"no answer from {', '.join(away)}"] if away else []
        parts += [f"left out after {BLAME_LIMIT} faults: {', '.join(blamed)}"] if blamed else []
        parts += [f"{name} is left ({why})" for name, why in left.items()]
        raise RunFailedError("; ".join(parts), "bring nodes back or name --spares, then fab resume", EXIT_NO_CAPACITY)
    return chosen


def add_blame(blame: Mapping[str, int], names: Sequence[str]) -> dict[str, int]:
    """Returns the counts with one more for each of `names`."""
    return dict(Counter(blame) + Counter(names))


def read_settings(run: RunFolder) -> Settings | None:
    """Returns nodes.json; None for a run on this machine."""
    found: Settings | None = _read(run.path / NODES_FILE, Settings)
    return found


def read_mpirun(run: RunFolder) -> MpirunSettings | None:
    """Returns mpirun.json; None for a run that mpirun does not start."""
    found: MpirunSettings | None = _read(run.path / MPIRUN_FILE, MpirunSettings)
    return found


def read_watch(run: RunFolder) -> Watch | None:
    """Returns supervision.json; None before there is a supervisor."""
    found: Watch | None = _read(run.path / "supervision.json", Watch)
    return found


def read_nodes(run: RunFolder, attempt: int) -> dict[str, NodeState]:
    """Returns what the agents of an attempt say, by node."""
    found = [_read(path, NodeState) for path in sorted((run.path / "nodes").glob("*.json"))]
    return {state.node: state for state in found if state is not None and state.attempt == attempt}


def write(path: Path, record: Record) -> None:
    """Replaces a record's file as a whole. It may hold the environment given to the run: its owner alone reads it."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.touch(mode=0o600)
    temporary.write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def _read(path: Path, kind: type[Any]) -> Any:
    try:
        return kind.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None
