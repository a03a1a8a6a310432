"""Backend `ssh`: one torchrun a node, each in a session of its own, started by the node's agent. All pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.backends.base import LaunchSpec
from launch.backends.local import SHUTDOWN_TIMEOUT_S, SIGNALS, rank_environment
from launch.plan import RunPlan

# 32 GPUs a node have no larger instance; EFA is a device beside them.
EFA_ENVIRONMENT = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}


@dataclass(frozen=True)
class Meeting:
    """Where the ranks and the agents of one start meet: on the first node."""

    address: str
    master_port: int
    lease_port: int


def torchrun_command(python: str, nodes: int, index: int, ranks: int, meeting: Meeting) -> tuple[str, ...]:
    """Returns the command of node `index`; configuration and secrets go by file, never as an argument."""
    return (
        *(python, "-m", "torch.distributed.run"),
        f"--nnodes={nodes}",
        f"--node-rank={index}",
        f"--nproc-per-node={ranks}",
        f"--master-addr={meeting.address}",
        f"--master-port={meeting.master_port}",
        "--max-restarts=0",
        f"--signals-to-handle={SIGNALS}",
        f"--shutdown-timeout={SHUTDOWN_TIMEOUT_S}",
        *("-m", "training"),
    )


def node_environment(
    plan: RunPlan, facts: Mapping[str, Any], ranks: int, run_dir: str, code: str, extra: Mapping[str, str]
) -> dict[str, str]:
    """Returns what the ranks of a node get: derived from facts about the node, then what the user gave."""
    env = rank_environment(plan, run_dir, code, console=False, cpu_count=facts["machine"]["cpu_count"])
    if plan.device == "cpu":
        env["OMP_NUM_THREADS"] = str(max(1, facts["machine"]["cpu_count"] // ranks))
    interface = facts.get("interface") or ""
    env.pop("GLOO_SOCKET_IFNAME", None)
    if interface:
        env["GLOO_SOCKET_IFNAME"] = interface
    if plan.device == "cuda":
        env["NCCL_DEBUG"] = "WARN"
        # A rank that finds another one gone ends instead of waiting for ever.
        env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
        if interface:
            env["NCCL_SOCKET_IFNAME"] = interface
        if facts.get("efa"):
            env |= EFA_ENVIRONMENT
    return env | dict(extra)


def node_specs(
    plan: RunPlan,
    facts: Mapping[str, Mapping[str, Any]],
    meeting: Meeting,
    run_dir: str,
    code: str,
    extra: Mapping[str, str],
) -> list[LaunchSpec]:
    """Returns what runs on each node of the plan; `code` is the folder of the checkout below the home folder."""
    specs = []
    for index, node in enumerate(plan.nodes):
        known = facts[node.name]
        place = code.replace("~", known["home"], 1)
        specs.append(
            LaunchSpec(
                node=node.name,
                argv=torchrun_command(known["python"], len(plan.nodes), index, node.ranks, meeting),
                env=node_environment(plan, known, node.ranks, run_dir, place, extra),
                directory=place,
            )
        )
    return specs


def agent_spec(spec: LaunchSpec, index: int, nodes: Sequence[str], meeting: Meeting, **settings: Any) -> dict[str, Any]:
    """Returns what the agent of a node is told. `settings`: run, ranks, attempt, token, lease_s,
    hang_s, stop_grace_s."""
    token, seconds = settings.pop("token"), settings.pop("lease_s")
    return {
        **settings,
        "node": spec.node,
        "index": index,
        # A member hears only the first node; that one hears all.
        "peers": [name for name in nodes if name != spec.node] if index == 0 else [nodes[0]],
        "argv": list(spec.argv),
        "env": dict(spec.env),
        "directory": spec.directory,
        "lease": {"address": meeting.address, "port": meeting.lease_port, "token": token, "seconds": seconds},
    }
