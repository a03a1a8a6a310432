"""Combinations of settings that cannot work, each with its reason.

A rule is a function of the whole configuration that returns (key path, message) or None; adding a rule is adding a
function to RULES. Only the configuration is looked at: what depends on the machine is checked by the plan.
"""

from __future__ import annotations

from collections.abc import Callable

from training.config.schema import RunConfig

Finding = tuple[tuple[str, ...], str]
Rule = Callable[[RunConfig], Finding | None]


def update_clipping_needs_tensors(config: RunConfig) -> Finding | None:
    """Update clipping takes a mean over each tensor; ZeRO hands the optimizer flat slices that cut across tensors."""
    training, stage = config.training, config.distributed.zero_stage
    if not training.update_clipping:
        return None
    key = ("training", "update_clipping")
    if training.optimizer != "adam-atan2":
        return (
            key,
            "update clipping belongs to optimizer adam-atan2; set training.optimizer: adam-atan2 or switch it off",
        )
    if stage != 0 or training.precision != "fp32":
        return key, (
            "update clipping needs whole tensors, but ZeRO 1-3 and the 16-bit optimizers update flat partitions that "
            "cut across tensors; set distributed.zero_stage: 0 and training.precision: fp32, or switch it off"
        )
    return None


def compile_needs_whole_weights(config: RunConfig) -> Finding | None:
    """ZeRO-3 gathers weights in Python hooks of each submodule, which a compiled region would skip or break at."""
    if config.training.compile is True and config.distributed.zero_stage == 3:
        return (
            "training",
            "compile",
        ), "compile cannot be combined with zero_stage 3 (weights are gathered by hooks inside the region)"
    return None


def schedule_fits_the_run(config: RunConfig) -> Finding | None:
    """Warm-up and cool-down must not overlap when the number of steps is given."""
    t = config.training
    cooldown = t.cooldown_steps if t.lr_schedule == "trapezoid" else 0
    if t.max_steps is not None and t.warmup_steps + cooldown > t.max_steps:
        return ("training", "warmup_steps"), (
            f"warm-up ({t.warmup_steps} steps) and cool-down ({cooldown}) together are longer than the run "
            f"(max_steps {t.max_steps}); set warmup_steps and cooldown_steps to fit"
        )
    return None


def minimum_is_below_peak(config: RunConfig) -> Finding | None:
    """The schedule ends at the minimum, so it cannot lie above the peak."""
    t = config.training
    if t.min_learning_rate > t.learning_rate:
        return (
            "training",
            "min_learning_rate",
        ), f"min_learning_rate {t.min_learning_rate} is above learning_rate {t.learning_rate}"
    return None


def micro_batch_divides_batch(config: RunConfig) -> Finding | None:
    """The global batch is a whole number of micro-batches, whatever the number of ranks."""
    t = config.training
    if t.micro_batch_size != "auto" and t.batch_size % t.micro_batch_size:
        return (
            "training",
            "micro_batch_size",
        ), f"batch_size {t.batch_size} is not a multiple of micro_batch_size {t.micro_batch_size}"
    return None


RULES: tuple[Rule, ...] = (
    update_clipping_needs_tensors,
    compile_needs_whole_weights,
    schedule_fits_the_run,
    minimum_is_below_peak,
    micro_batch_divides_batch,
)


def impossible_combinations(config: RunConfig) -> list[Finding]:
    """Returns every combination in `config` that cannot work."""
    return [finding for rule in RULES if (finding := rule(config))]
