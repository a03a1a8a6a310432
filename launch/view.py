"""How a run on nodes is at this moment: a line a node and a line for the run. Pure, but for reading the run folder."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from launch.runs import observed_state
from launch.supervision import NodeState, Watch, read_nodes
from training.checkpoint.layout import last_save
from training.records import MetricsRecord, RunFolder, RunState

# The last record of metrics.jsonl is within this; long runs have long files.
TAIL_BYTES = 16 * 1024


@dataclass(frozen=True)
class NodeView:
    """One node: phase of its slowest rank, its lowest step, and how long the quietest of its ranks has been silent."""

    name: str
    ranks: int
    phase: str
    step: int
    heartbeat_age_s: float | None


@dataclass(frozen=True)
class RunView:
    """The whole run; None where something is not known yet."""

    name: str
    phase: str
    step: int
    total_steps: int
    loss: float | None
    tokens_per_s: float | None
    mfu_ratio: float | None
    checkpoint_age_s: float | None
    attempt: int
    restarts: int
    nodes: tuple[NodeView, ...]
    left: Mapping[str, str]


# From the phase that holds a run up most to the one that holds it up least.
_ORDER = ("starting", "training", "closing", "ended")


def look(run: RunFolder, watch: Watch) -> RunView:
    """Returns how the run is, read from its folder."""
    saved = last_save(run.checkpoints)
    metrics = last_metrics(run)
    return run_view(observed_state(run), metrics, watch, read_nodes(run, watch.attempt), saved, time.time())


def run_view(
    state: RunState,
    metrics: MetricsRecord | None,
    watch: Watch,
    nodes: Mapping[str, NodeState],
    checkpoint: float | None,
    now: float,
) -> RunView:
    """Returns the view at `now`; `checkpoint` is when the newest one was written. All times are Unix times."""
    return RunView(
        name=state.name,
        phase=state.phase if watch.phase == "running" else watch.phase,
        step=max(state.step, metrics.step if metrics else 0),
        total_steps=state.total_steps,
        loss=metrics.loss if metrics else None,
        tokens_per_s=metrics.tokens_per_s if metrics else None,
        mfu_ratio=metrics.mfu_ratio if metrics else None,
        checkpoint_age_s=None if checkpoint is None else max(0.0, now - checkpoint),
        attempt=watch.attempt,
        restarts=watch.restarts,
        nodes=tuple(_node_view(name, nodes.get(name), now) for name in watch.active),
        left=watch.left,
    )


def _node_view(name: str, state: NodeState | None, now: float) -> NodeView:
    if state is None or not state.ranks:
        return NodeView(name, 0, "starting", 0, None)
    phases = [beat["phase"] for beat in state.ranks]
    return NodeView(
        name=name,
        ranks=len(phases),
        phase=min(phases, key=_ORDER.index),
        step=min(beat["step"] for beat in state.ranks),
        heartbeat_age_s=max(max(0.0, now - beat["time"]) for beat in state.ranks),
    )


def plain(view: RunView) -> str:
    """Returns the view in one line, for logs and terminals that cannot redraw."""
    parts = [f"{view.name} {view.phase}", *run_facts(view)]
    for node in view.nodes:
        age = "" if node.heartbeat_age_s is None else f" {node.heartbeat_age_s:.0f} s ago"
        parts.append(f"{node.name} {node.phase} step {node.step}{age}")
    return " | ".join([*parts, *(f"{name} left: {why}" for name, why in view.left.items())])


def run_facts(view: RunView) -> list[str]:
    """Returns what is known of the run: step, loss, speed, age of the last checkpoint, restarts."""
    facts = [f"step {view.step}/{view.total_steps or '?'}"]
    facts += [] if view.loss is None else [f"loss {view.loss:.3f}"]
    facts += [] if view.tokens_per_s is None else [f"{view.tokens_per_s:,.0f} tokens/s"]
    facts.append("MFU unknown" if view.mfu_ratio is None else f"MFU {view.mfu_ratio:.1%}")
    age = view.checkpoint_age_s
    facts.append("no checkpoint yet" if age is None else f"checkpoint {age:.0f} s ago")
    return facts + ([f"{view.restarts} restart(s)"] if view.restarts else [])


def last_metrics(run: RunFolder) -> MetricsRecord | None:
    """Returns the last whole line of metrics.jsonl without reading the rest of it."""
    try:
        with run.metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return None
    return MetricsRecord.model_validate_json(lines[-1]) if lines else None
