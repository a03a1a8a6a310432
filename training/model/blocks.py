"""Parts of the model: RMSNorm, rotary embedding, attention, gated MLP and the sandwich block.

Shapes: B sequences, T tokens, C width, H heads, D = C / H, I inner width of the MLP. Parameters may be float32,
bfloat16 or float16; norm statistics and the rotary embedding are always float32. Every module touches only parameters
that it owns, inside its own forward: ZeRO-3 gathers them there.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.config.schema import ModelSection


def autocast_dtype(device: str) -> torch.dtype | None:
    """The type that autocast computes in on this kind of device; None where it is off or does not exist."""
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


class KeyValueStore(Protocol):
    """What attention needs of a cache: take the keys and values of new tokens, give those of all tokens so far."""

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Both [B, H, T_new, D] in, both [B, H, T_all, D] out."""
        ...


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) over the last axis in float32, cast back to the input's type, times a weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (x32 * scale).to(x.dtype) * self.weight


class RotaryTable(nn.Module):
    """cos and sin of the rotary angles t * base^(-2j/D), as float32 [context, D/2, 2]; not part of a state dict."""

    table: Tensor

    def __init__(self, context_length: int, head_width: int, base: float) -> None:
        super().__init__()
        self.context_length, self.head_width, self.base = context_length, head_width, base
        self.register_buffer("table", self._build(torch.get_default_device()), persistent=False)

    def _build(self, device: torch.device) -> Tensor:
        exponents = torch.arange(0, self.head_width, 2, dtype=torch.float64, device=device) / self.head_width
        positions = torch.arange(self.context_length, dtype=torch.float64, device=device)
        angles = torch.outer(positions, self.base**-exponents)
        return torch.stack((angles.cos(), angles.sin()), dim=-1).float()

    def _apply(self, fn: Any, recurse: bool = True) -> RotaryTable:
        # Runs at every .to(), .bfloat16() and .to_empty(): the table follows the device but stays exact float32.
        super()._apply(fn, recurse)
        self.table = self._build(self.table.device)
        return self

    def forward(self, length: int, start: int = 0) -> Tensor:
        """Returns the rows of positions start .. start + length - 1."""
        return self.table[start : start + length]


def apply_rotary(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotates interleaved pairs (2j, 2j+1) of x [B, T, ..., D] by the angles in rotary [T, D/2, 2]; float32 out."""
    shape = (1, x.shape[1], *(1 for _ in x.shape[2:-1]), x.shape[-1] // 2)
    pairs = x.float().unflatten(-1, (-1, 2))
    if not torch.compiler.is_compiling():
        # A pair is a complex number: one multiplication, ten times as fast as the six operations below on a processor.
        turned = torch.view_as_complex(pairs) * torch.view_as_complex(rotary).view(shape)
        return torch.view_as_real(turned).flatten(-2)
    cos, sin = rotary[..., 0].view(shape), rotary[..., 1].view(shape)
    even, odd = pairs.unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


class Attention(nn.Module):
    """Causal multi-head attention with one fused projection and a learned bias on queries and keys before RoPE."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.heads, self.head_width = config.heads, config.head_width
        self.Wqkv = nn.Linear(config.width, 3 * config.width, bias=False)  # the reference's names: its weights load
        self.proj = nn.Linear(config.width, config.width, bias=False)
        self.qk_bias = nn.Parameter(torch.zeros(2, 1, self.heads, self.head_width)) if config.qk_bias else None

    def forward(self, x: Tensor, rotary: Tensor, cache: KeyValueStore | None = None) -> Tensor:
        """x [B, T, C], rotary of the same T positions; with a cache the T tokens follow those already in it."""
        batch, length, width = x.shape
        qkv = self.Wqkv(x).view(batch, length, 3, self.heads, self.head_width)
        qk, v = qkv[:, :, :2], qkv[:, :, 2].transpose(1, 2)
        if self.qk_bias is not None:
            qk = qk + self.qk_bias.view(2, self.heads, self.head_width)
        q, k = apply_rotary(qk, rotary).to(v.dtype).permute(2, 0, 3, 1, 4).unbind(0)
        if cache is None:
            out = causal_attention(q, k, v)
        else:
            k, v = cache.extend(k, v)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=_causal_mask(length, k.shape[2], x.device))
        return self.proj(out.transpose(1, 2).reshape(batch, length, width))


# Up to this length the T x T scores of a processor's micro-batch are small beside its other activations.
_EXPLICIT_ATTENTION_TOKENS = 512


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D), causal) v for q, k, v [B, H, T, D], by the fastest route that torch has."""
    batch, heads, length, head_width = q.shape
    if q.device.type != "cpu" or q.dtype != torch.bfloat16 or length > _EXPLICIT_ATTENTION_TOKENS:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    # In bfloat16 the fused kernel for processors takes four times as long, forward and backward, as these three calls.
    future = torch.full((length, length), -math.inf, dtype=q.dtype).triu_(1)
    q, k, v = (x.reshape(-1, length, head_width) for x in (q, k, v))
    scores = torch.baddbmm(future, q, k.transpose(1, 2), alpha=head_width**-0.5)
    return torch.bmm(scores.softmax(-1), v).view(batch, heads, length, head_width)


def _causal_mask(queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Mask of the last `queries` of `keys` tokens; none for a single query, which sees everything."""
    if queries == 1:
        return None
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


class GatedMLP(nn.Module):
    """proj(SiLU(g) * u), where g and u are the two halves of fc(x)."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.fc = nn.Linear(config.width, 2 * config.mlp_width, bias=False)
        self.proj = nn.Linear(config.mlp_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc(x).chunk(2, dim=-1)
        return self.proj(F.silu(gate) * up)


class SandwichBlock(nn.Module):
    """Attention and MLP, each with a norm before the branch and a norm after the residual sum."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.norm_1 = RMSNorm(config.width, config.norm_eps)
        self.attn = Attention(config)
        self.norm_2 = RMSNorm(config.width, config.norm_eps)
        self.norm_3 = RMSNorm(config.width, config.norm_eps)
        self.mlp = GatedMLP(config)
        self.norm_4 = RMSNorm(config.width, config.norm_eps)

    def forward(self, x: Tensor, rotary: Tensor, cache: KeyValueStore | None = None) -> Tensor:
        x = self.norm_2(x + self.attn(self.norm_1(x), rotary, cache))
        return self.norm_4(x + self.mlp(self.norm_3(x)))
