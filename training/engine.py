"""The model under DeepSpeed ZeRO: micro-steps in, one optimizer step out.

All that is particular to DeepSpeed is in this file and in zero3.py.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor

from training.checkpoint.export import read_weights
from training.config import RunConfig
from training.distributed import RankInfo
from training.errors import UsageError
from training.model.init import init_weights
from training.model.recurrent import ModelOutput, RecurrentLM, compile_blocks
from training.optim import build_optimizer
from training.phases import PhaseClock
from training.zero3 import CoreHold

# What decides which weights a model has; the other keys of its section may differ.
WEIGHT_KEYS = (
    *("vocab_size", "width", "heads", "mlp_width", "prelude_layers", "core_layers", "coda_layers"),
    *("qk_bias", "tie_embeddings", "rope_base"),
)


@dataclass(frozen=True)
class EngineSettings:
    """What the plan decided for this run."""

    precision: str
    zero_stage: int
    micro_batch: int
    accumulation: int
    compile: bool


@dataclass(frozen=True)
class StepOutcome:
    """What an optimizer step did."""

    applied: bool
    grad_norm: float | None


def deepspeed_config(config: RunConfig, settings: EngineSettings, rank: RankInfo) -> dict[str, Any]:
    """Returns the DeepSpeed configuration of a run; pure."""
    stage, precision = settings.zero_stage, settings.precision
    on_gpu = rank.device.type == "cuda"
    values: dict[str, Any] = {
        "train_batch_size": settings.micro_batch * settings.accumulation * rank.world_size,
        "train_micro_batch_size_per_gpu": settings.micro_batch,
        "gradient_accumulation_steps": settings.accumulation,
        "gradient_clipping": config.training.gradient_clipping,
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": on_gpu,
            "contiguous_gradients": on_gpu,
            "stage3_gather_16bit_weights_on_model_save": stage == 3,
        },
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16"},
    }
    if precision == "bf16" and stage == 1:
        # Micro-batches are summed in fp32: bf16 loses small contributions.
        values["data_types"] = {"grad_accum_dtype": "fp32"}
    return values


class Engine:
    """A RecurrentLM with its optimizer, sharded over the ranks."""

    def __init__(self, config: RunConfig, settings: EngineSettings, rank: RankInfo) -> None:
        self.config, self.settings, self.rank = config, settings, rank
        self.clock = PhaseClock(_timing_event if rank.device.type == "cuda" else None)
        model = RecurrentLM(
            config.model, activation_checkpointing=config.training.activation_checkpointing == "per_iteration"
        )
        if config.run.init_from is None:
            init_weights(model, config.model, config.run.seed)
        else:
            load_exported(model, config, Path(config.run.init_from))
        model.to(rank.device)
        if settings.compile:
            compile_blocks(model)
        self.deepspeed = _initialize(model, config, settings, rank)
        self.model: RecurrentLM = self.deepspeed.module
        self._hold = CoreHold(core_parameters(self.model)) if settings.zero_stage == 3 else None

    def micro_step(self, tokens: Tensor, labels: Tensor, last: bool, **forward: Any) -> ModelOutput:
        """Forward and backward of one micro-batch; `last` marks the last one before the optimizer step."""
        if self._hold is not None:
            self._hold.hold()
        self.deepspeed.set_gradient_accumulation_boundary(last)
        output: ModelOutput = self.deepspeed(tokens, labels, **forward)
        self.clock.mark("forward")
        self.deepspeed.backward(output.loss)
        self.clock.mark("backward")
        return output

    def finish_step(self, learning_rate: float) -> StepOutcome:
        """Updates the weights, or skips the step on all ranks when a gradient is not finite on one of them."""
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = learning_rate
        if self._gradients_are_finite():
            self.deepspeed.step()
        else:
            self._skip_step()
        applied = bool(self.deepspeed.was_step_applied())
        outcome = StepOutcome(applied, self._grad_norm() if applied else None)
        self.clock.mark("optimizer")
        return outcome

    def evaluate(self, tokens: Tensor, labels: Tensor, **forward: Any) -> ModelOutput:
        """Forward without gradient."""
        if self._hold is not None:
            self._hold.hold()
        with torch.no_grad():
            output: ModelOutput = self.deepspeed(tokens, labels, **forward)
        if self._hold is not None:
            self._hold.release()
        return output

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns the whole weights on the CPU, on rank 0; a collective under ZeRO-3."""
        state = {}
        for name, parameter in self.model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=self.settings.zero_stage == 3):
                if self.rank.is_first:
                    state[name] = parameter.detach().to("cpu", copy=True)
        return state

    def _gradients_are_finite(self) -> bool:
        """Checks what DeepSpeed does not: it votes by itself in stages 1 and 2, and in 16-bit stage 0."""
        stage = self.settings.zero_stage
        if stage == 3:
            # Stage 3 looks only when the precision is fp16; the check itself works in all and is a collective.
            self.deepspeed.optimizer.check_overflow()
            return not self.deepspeed.optimizer.overflow
        if stage == 0 and self.settings.precision == "fp32":
            # Gradients are the same on all ranks after the reduction, and so is the answer.
            norms = [p.grad.norm() for p in self.model.parameters() if p.grad is not None]
            return bool(torch.isfinite(torch.stack(norms)).all())
        return True

    def _skip_step(self) -> None:
        if self.settings.zero_stage == 3:
            self.deepspeed.optimizer._overflow_clean_up(1.0)
            self.deepspeed.optimizer._partition_all_parameters()
        self.deepspeed.zero_grad()
        self.deepspeed._step_applied = False
        self.deepspeed.skipped_steps += 1
        self.deepspeed.global_steps += 1
        self.deepspeed.micro_steps += 1

    def _grad_norm(self) -> float | None:
        norm = self.deepspeed.get_global_grad_norm()
        return None if norm is None else float(norm)


def load_exported(model: RecurrentLM, config: RunConfig, folder: Path) -> None:
    """Fills the model with weights from `folder`. Raises UsageError when they are of another shape."""
    shape, weights = read_weights(folder)
    ours = config.model
    keys = [key for key in WEIGHT_KEYS if getattr(shape, key) != getattr(ours, key)]
    if keys:
        differences = ", ".join(f"model.{key} is {getattr(ours, key)}, there {getattr(shape, key)}" for key in keys)
        raise UsageError(f"run.init_from: {folder} is of another model: {differences}", "set those keys to its values")
    model.load_state_dict(weights)


def core_parameters(model: RecurrentLM) -> list[torch.nn.Parameter]:
    """Returns the parameters that every core iteration uses: the adapter and the core blocks."""
    return [*model.transformer["adapter"].parameters(), *model.transformer["core_block"].parameters()]


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _initialize(model: RecurrentLM, config: RunConfig, settings: EngineSettings, rank: RankInfo) -> Any:
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # Its C++ helper for shared-memory collectives would be compiled at the first start (a minute, and it needs g++).
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=build_optimizer(model, config.training),
        config=deepspeed_config(config, settings, rank),
    )
    return engine
