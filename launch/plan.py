"""RunPlan: everything that is decided before a run starts, as a value that can be printed.

`build_plan` is a pure function of the configuration and of facts about the nodes; it raises ConfigError with all
findings when the configuration does not fit them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launch.errors import ConfigError
from launch.machine import MachineFacts
from launch.memory import MemoryEstimate, estimate_memory
from training.checkpoint.policy import save_seconds
from training.checkpoint.settings import describe_interval
from training.config import RunConfig
from training.flops import flop_per_token
from training.hardware import peak_flop_per_s
from training.model.sampler import RecurrenceSampler
from training.model_size import count_parameters

# Share of a device's memory that the estimate may fill; the rest is for the allocator, the libraries and the
# estimate's error.
MEMORY_SHARE = 0.85
# For the arithmetic of leaving in time: what a node writes to local NVMe or a parallel file system, and the target.
NODE_WRITE_BYTES_PER_S = 1e9
SAVE_TARGET_S = 90.0
# Ranks that train here when there is no GPU and no number was given.
CPU_RANKS = 2
# On processors larger micro-batches leave the caches and gain nothing (benchmarks/train_step.py).
CPU_MICRO_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class DatasetFacts:
    """What a plan needs to know of a dataset; known once it is prepared."""

    train_sequences: int
    validation_sequences: int
    sequence_length: int


@dataclass(frozen=True)
class NodePlan:
    """One node's part of the run."""

    name: str
    ranks: int


@dataclass(frozen=True)
class RunPlan:
    """A run as it will start."""

    nodes: tuple[NodePlan, ...]
    device: str
    device_name: str
    backend: str
    init_method: str
    precision: str
    zero_stage: int
    compile: bool
    batch_size: int
    micro_batch: int
    accumulation: int
    sequence_length: int
    total_steps: int | None
    parameters: int
    core_parameters: int
    memory: MemoryEstimate
    device_memory_bytes: int
    checkpoints: str
    flop_per_token: float
    peak_flop_per_s: float | None
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks over all nodes."""
        return sum(node.ranks for node in self.nodes)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step reads."""
        return self.batch_size * self.sequence_length

    @property
    def total_flop(self) -> float | None:
        """Model FLOP of the whole run."""
        return None if self.total_steps is None else self.flop_per_token * self.tokens_per_step * self.total_steps

    def as_json(self) -> dict[str, Any]:
        """Returns the plan as plain values for plan.json and --json."""
        derived = {
            "world_size": self.world_size,
            "tokens_per_step": self.tokens_per_step,
            "total_flop": self.total_flop,
        }
        memory = {**asdict(self.memory), "total_bytes": self.memory.total_bytes}
        return {**asdict(self), "memory": memory, **derived}


def build_plan(config: RunConfig, nodes: Sequence[MachineFacts], dataset: DatasetFacts | None = None) -> RunPlan:
    """Returns the plan for `config` on `nodes`. Raises ConfigError with everything that does not fit."""
    findings: list[str] = []
    device = "cuda" if all(node.gpus for node in nodes) else "cpu"
    ranks = tuple(NodePlan(node.name, _ranks_on(config, node, device, findings)) for node in nodes)
    world_size = sum(node.ranks for node in ranks)
    backend = _backend(config, device, findings)
    precision = _precision(config, nodes, device, findings)
    sequence_length = dataset.sequence_length if dataset else config.model.context_length
    if sequence_length > config.model.context_length:
        findings.append(
            f"data.path: sequences of {sequence_length} tokens are longer than model.context_length "
            f"{config.model.context_length}; prepare shorter ones or raise it"
        )
    if dataset is not None and not dataset.validation_sequences:
        findings.append("data.path: no sequence is held out; prepare it with a larger prepare.validation_fraction")
    if config.training.batch_size % world_size:
        findings.append(_batch_finding(config.training.batch_size, world_size))
    if findings:
        raise ConfigError(findings)
    memory_bytes = _device_memory(nodes, ranks, device)
    stage, micro, memory, notes = _fit(config, precision, world_size, sequence_length, memory_bytes, device)
    size = count_parameters(config.model)
    peak = peak_flop_per_s(nodes[0].gpus[0].name, precision) if device == "cuda" else None
    return RunPlan(
        nodes=ranks,
        device=device,
        device_name=nodes[0].gpus[0].name if device == "cuda" else "cpu",
        backend=backend,
        init_method=config.distributed.init_method,
        precision=precision,
        zero_stage=stage,
        compile=_compile(config, device, stage),
        batch_size=config.training.batch_size,
        micro_batch=micro,
        accumulation=config.training.batch_size // (micro * world_size),
        sequence_length=sequence_length,
        total_steps=total_steps(config, dataset),
        parameters=size.total,
        core_parameters=size.core,
        memory=memory,
        device_memory_bytes=memory_bytes,
        checkpoints=describe_saves(config, len(nodes), world_size, size.total),
        flop_per_token=flop_per_token(config.model, sequence_length, *RecurrenceSampler(config.model).mean_steps()),
        peak_flop_per_s=None if peak is None else peak * world_size,
        notes=tuple(notes),
    )


def describe_saves(config: RunConfig, nodes: int, ranks: int, parameters: int) -> str:
    """Returns when the run saves, and whether a save fits into the notice that a spot node gets (two minutes).

    Arithmetic, at an assumed rate of writing a node; the run itself logs what its saves took.
    """
    seconds = save_seconds(parameters, nodes=nodes, node_write_bytes_per_s=NODE_WRITE_BYTES_PER_S)
    fits = "within" if seconds <= SAVE_TARGET_S else "NOT within"
    return (
        f"{describe_interval(config.checkpoint, ranks)}; leaving takes about {seconds:.1f} s to save at "
        f"{NODE_WRITE_BYTES_PER_S / 1e9:g} GB/s a node, {fits} the {SAVE_TARGET_S:.0f} s of a spot notice"
    )


def total_steps(config: RunConfig, dataset: DatasetFacts | None) -> int | None:
    """Returns the optimizer steps of the run; None while the size of the dataset is not known."""
    if config.training.max_steps is not None:
        return config.training.max_steps
    if dataset is None:
        return None
    return max(1, config.training.num_epochs * dataset.train_sequences // config.training.batch_size)


def _ranks_on(config: RunConfig, node: MachineFacts, device: str, findings: list[str]) -> int:
    wanted = config.distributed.ranks_per_node
    if device == "cpu":
        return CPU_RANKS if wanted == "auto" else wanted
    if wanted == "auto":
        return len(node.gpus)
    if wanted > len(node.gpus):
        findings.append(
            f"distributed.ranks_per_node: {wanted} ranks on {node.name}, which has {len(node.gpus)} GPU(s); "
            f"set it to {len(node.gpus)} or less, or to auto"
        )
    return wanted


def _backend(config: RunConfig, device: str, findings: list[str]) -> str:
    wanted = config.distributed.backend
    if wanted == "auto":
        return "nccl" if device == "cuda" else "gloo"
    if wanted == "nccl" and device == "cpu":
        findings.append(
            "distributed.backend: nccl needs an NVIDIA GPU on every node and none was found; "
            "use auto or gloo (for example --set distributed.backend=auto)"
        )
    return wanted


def _precision(config: RunConfig, nodes: Sequence[MachineFacts], device: str, findings: list[str]) -> str:
    wanted = config.training.precision
    if device == "cpu":
        if wanted == "fp16":
            findings.append("training.precision: fp16 needs a GPU; use bf16, fp32 or auto")
        if wanted != "auto":
            return wanted
        return "bf16" if all(node.cpu_bf16 for node in nodes) else "fp32"
    if wanted != "auto":
        return wanted
    # bf16 arithmetic came with compute capability 8.0 (A100).
    return "bf16" if all(gpu.compute_capability >= (8, 0) for node in nodes for gpu in node.gpus) else "fp16"


def _batch_finding(batch_size: int, world_size: int) -> str:
    below, above = batch_size // world_size * world_size, math.ceil(batch_size / world_size) * world_size
    near = f"{below} or {above}" if below else f"{above}"
    return (
        f"training.batch_size: {batch_size} sequences cannot be shared evenly by {world_size} ranks; "
        f"use {near}, or another number of ranks"
    )


def _compile(config: RunConfig, device: str, stage: int) -> bool:
    if config.training.compile == "auto":
        # On processors the cold compilation (20 to 60 s) eats what it gains in a short run, and it needs a C++
        # compiler.
        return device == "cuda" and stage != 3
    return config.training.compile


def _device_memory(nodes: Sequence[MachineFacts], ranks: Sequence[NodePlan], device: str) -> int:
    if device == "cuda":
        return min(gpu.memory_bytes for node in nodes for gpu in node.gpus)
    return min(node.memory_bytes // plan.ranks for node, plan in zip(nodes, ranks, strict=True))


def _fit(
    config: RunConfig, precision: str, world_size: int, sequence_length: int, memory_bytes: int, device: str
) -> tuple[int, int, MemoryEstimate, list[str]]:
    """Chooses ZeRO stage and micro-batch: the lowest stage, then the largest micro-batch, that fit."""
    wanted_stage = config.distributed.zero_stage
    # Stage 0 is taken only when asked for: with one rank, stage 1 does the same and checkpoints alike.
    stages = (1, 2, 3) if wanted_stage == "auto" else (wanted_stage,)
    candidates = _micro_batches(config, world_size, sequence_length, device)
    notes: list[str] = []
    for stage in stages:
        for micro in candidates:
            memory = estimate_memory(
                config.model,
                precision=precision,
                zero_stage=stage,
                world_size=world_size,
                micro_batch=micro,
                sequence_length=sequence_length,
                checkpointing=config.training.activation_checkpointing == "per_iteration",
            )
            if memory.total_bytes <= MEMORY_SHARE * memory_bytes:
                return stage, micro, memory, notes
    notes.append(
        f"the estimate ({memory.total_bytes / 2**30:.1f} GiB a rank) is above {MEMORY_SHARE:.0%} of the device's "
        f"{memory_bytes / 2**30:.1f} GiB; use more ranks, activation_checkpointing: per_iteration or a smaller model"
    )
    return stages[-1], candidates[-1], memory, notes


def _micro_batches(config: RunConfig, world_size: int, sequence_length: int, device: str) -> list[int]:
    share = config.training.batch_size // world_size
    if config.training.micro_batch_size != "auto":
        micro = config.training.micro_batch_size
        if share % micro:
            raise ConfigError(
                [
                    f"training.micro_batch_size: {micro} does not divide the {share} sequences that each of "
                    f"{world_size} ranks takes of batch_size {config.training.batch_size}"
                ]
            )
        return [micro]
    most = max(1, CPU_MICRO_BATCH_TOKENS // sequence_length) if device == "cpu" else share
    return [size for size in range(min(share, most), 0, -1) if share % size == 0]
