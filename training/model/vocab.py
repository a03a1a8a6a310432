"""The token table: embedding, output head, and cross entropy on top of it.

One module serves as the embedding, as the head, or as both (tied). It does all three inside its own forward, because
ZeRO-3 gathers a weight only around the forward of the module that owns it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.model.blocks import autocast_dtype

IGNORED_LABEL = -100
_CHUNK_ELEMENTS = 2**26  # float32 logits held at once: 256 MiB, 1024 tokens at 65,536 entries


class VocabTable(nn.Module):
    """A weight [V, C], used by row (embedding) or as a projection to V logits (head)."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width))

    def forward(
        self, tokens: Tensor | None = None, *, hidden: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        """tokens [B, T] gives embeddings; hidden [B, T, C] gives float32 logits [B, T, V] or, with labels, the loss.

        The loss is the mean cross entropy in float32 over labels that are not -100; zero if there are none.
        """
        if hidden is None:
            assert tokens is not None
            return F.embedding(tokens, self.weight)
        if labels is None:
            return F.linear(hidden, self.weight).float()
        return linear_cross_entropy(hidden.flatten(0, -2), self.weight, labels.flatten())


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int | None = None) -> Tensor:
    """Mean cross entropy of softmax(hidden @ weight^T), without ever holding the logits of more than one chunk.

    hidden [N, C], weight [V, C], labels [N]; float32 scalar. The gradients are computed chunk by chunk in the forward
    pass, while the logits are there, so nothing is recomputed and the FLOPs are those of the plain form.
    """
    # What autocast would do, spelled out: it must not keep casts made inside, where there is no gradient.
    dtype = autocast_dtype(hidden.device.type) or hidden.dtype
    chunk = chunk_tokens or max(1, _CHUNK_ELEMENTS // weight.shape[0])
    loss: Tensor = _LinearCrossEntropy.apply(hidden.to(dtype), weight.to(dtype), labels, chunk)
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
        needs_grad = any(ctx.needs_input_grad[:2])
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight: Tensor | None = None
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            part, target = hidden[rows], labels[rows]
            loss, grad_logits = _chunk_loss(part @ weight.t(), target, needs_grad)
            total += loss
            if grad_hidden is None or grad_logits is None:
                continue
            grad_hidden[rows] = grad_logits @ weight
            grad_part = grad_logits.t() @ part
            # Several chunks are summed in float32; a single one needs no second copy.
            grad_weight = (
                grad_part if grad_weight is None and chunk >= hidden.shape[0] else _add(grad_weight, grad_part)
            )
        count = (labels != IGNORED_LABEL).sum().clamp(min=1)
        if needs_grad:
            ctx.save_for_backward(grad_hidden, grad_weight, count)
            ctx.weight_dtype = weight.dtype
        return total / count

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None, None]:
        # The saved gradients are those of the summed loss: of order one, so float16 does not lose them before the
        # loss scale.
        grad_hidden, grad_weight, count = ctx.saved_tensors
        scale = grad_output / count
        return (grad_hidden * scale).to(grad_hidden.dtype), (grad_weight * scale).to(ctx.weight_dtype), None, None


def _chunk_loss(logits: Tensor, labels: Tensor, needs_grad: bool) -> tuple[Tensor, Tensor | None]:
    """Summed loss of a chunk and its gradient in the logits (softmax minus one-hot, zero where ignored)."""
    valid = labels != IGNORED_LABEL
    index = labels.clamp(min=0).unsqueeze(1)
    log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    loss = -(log_probs.gather(1, index).squeeze(1) * valid).sum()
    if not needs_grad:
        return loss, None
    grad = log_probs.exp_()
    grad.scatter_add_(1, index, torch.full_like(index, -1, dtype=grad.dtype))
    grad.mul_(valid.unsqueeze(1))
    return loss, grad.to(logits.dtype)


def _add(total: Tensor | None, part: Tensor) -> Tensor:
    return part.float() if total is None else total.add_(part)
