"""Optimizers, parameter groups and learning-rate schedules.

Learning rates are a pure function of the optimizer step (never of micro-batches or ranks), so a resumed run continues
exactly. Weight decay means the same in both optimizers: each step multiplies a weight by 1 - lr * weight_decay.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from training.config.schema import TrainingSection


def build_optimizer(model: nn.Module, training: TrainingSection) -> torch.optim.Optimizer:
    """Returns the optimizer that `training` asks for, over the groups of `parameter_groups`."""
    groups = parameter_groups(model, training.weight_decay)
    betas = (training.beta1, training.beta2)
    if training.optimizer == "adam-atan2":
        return AdamAtan2(
            groups, lr=training.learning_rate, betas=betas, eps=training.eps, update_clipping=training.update_clipping
        )
    return torch.optim.AdamW(groups, lr=training.learning_rate, betas=betas, eps=training.eps, fused=True)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Splits the parameters into matrices (adapter included), embedding and head, and norms with biases (no decay).

    Groups are in a fixed order with parameters in the model's order, as checkpoints of optimizers need; empty ones
    are left out.
    """
    matrices, tables, vectors = [], [], []
    for name, parameter in model.named_parameters():
        if name.endswith(("wte.weight", "lm_head.weight")):
            tables.append(parameter)
        elif name.endswith("qk_bias") or "norm_" in name or "ln_f" in name:
            vectors.append(parameter)
        else:
            matrices.append(parameter)
    groups = [
        {"params": matrices, "weight_decay": weight_decay, "name": "matrices"},
        {"params": tables, "weight_decay": weight_decay, "name": "tables"},
        {"params": vectors, "weight_decay": 0.0, "name": "norms"},
    ]
    return [group for group in groups if group["params"]]


class AdamAtan2(torch.optim.Optimizer):
    """Adam with atan2(m, sqrt(v)) for m / (sqrt(v) + eps), as the reference has it (arXiv 2502.05171, section 4.1).

    With t from 1, and m = g, v = g^2 before the first step:
        m = b1 m + (1 - b1) g;   v = max(b2 v + (1 - b2) g^2, eps^2)
        w = w (1 - lr wd) - lr / c / (1 - b1^t) * atan2(m, sqrt(v / (1 - b2^t)))
    where c is 1, or with update clipping max(1, sqrt(mean(g^2 / v))) over the tensor. An element moves by at most
    about 1.57 lr. Without update clipping everything is elementwise, so it may be given ZeRO's flat partitions.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        update_clipping: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "update_clipping": update_clipping,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient; returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            # The step is a tensor, as in torch's Adam: DeepSpeed's checkpoints handle it like the moments.
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state["exp_avg"] = grad.clone()
            state["exp_avg_sq"] = grad.square()
        state["step"] += 1
        t, (beta1, beta2), lr = float(state["step"]), group["betas"], group["lr"]
        m = state["exp_avg"].lerp_(grad, 1 - beta1)
        v = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2).clamp_(min=group["eps"] ** 2)
        step_size = lr / (1 - beta1**t)
        if group["update_clipping"]:
            step_size = step_size / (grad.square() / v).mean().sqrt().clamp(min=1.0)
        if group["weight_decay"]:
            parameter.mul_(1 - lr * group["weight_decay"])
        parameter.sub_(torch.atan2(m, v.sqrt().div_(math.sqrt(1 - beta2**t))).mul_(step_size))


def lr_at(step: int, training: TrainingSection, total_steps: int) -> float:
    """Returns the learning rate of optimizer step `step`, counted from 1; `total_steps` is the last one.

    Warm-up is linear from zero. After it: constant; linear or cosine from peak to minimum at the last step; trapezoid
    stays at the peak and falls linearly to the minimum over the last cooldown_steps. After the last step it stays
    where it ended.
    """
    peak, low = training.learning_rate, training.min_learning_rate
    if step < training.warmup_steps:
        return peak * step / training.warmup_steps
    if training.lr_schedule == "constant":
        return peak
    if training.lr_schedule == "trapezoid":
        left = max(total_steps - step, 0)
        return peak if left >= training.cooldown_steps else low + (peak - low) * left / training.cooldown_steps
    length = total_steps - training.warmup_steps
    progress = min((step - training.warmup_steps) / length, 1.0) if length > 0 else 1.0
    shape = 1 - progress if training.lr_schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return low + (peak - low) * shape
