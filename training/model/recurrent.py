"""The recurrent-depth language model (arXiv 2502.05171), top to bottom.

    e      = Prelude( wte(tokens) * sqrt(C) )
    s_0    = noise
    s_i    = Core( Adapter( concat(s_{i-1}, e) ) )      i = 1..r, the same weights each time
    logits = head( ln_f( Coda( ln_f(s_r) ) ) )          ln_f is one module used twice

Training runs the first n iterations without gradient and the last k with it, so memory and backward cost do not
depend on r = n + k. The loop is plain Python: only single blocks are compiled, so a new r compiles nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from training.config.schema import ModelSection
from training.model.blocks import KeyValueStore, RMSNorm, RotaryTable, SandwichBlock, autocast_dtype
from training.model.state import draw_state, state_statistics
from training.model.vocab import VocabTable


class ModelOutput(NamedTuple):
    """What a forward returns: loss (with labels), float32 logits (without, or on request), statistics (on request)."""

    loss: Tensor | None
    logits: Tensor | None
    state_stats: dict[str, Tensor] | None


class RecurrentLM(nn.Module):
    """The model. Parameters carry the reference's names, so its checkpoints load; a tied head has none of its own."""

    def __init__(self, config: ModelSection, *, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.transformer = nn.ModuleDict(
            {
                "wte": VocabTable(config.vocab_size, config.width),
                "prelude": _blocks(config.prelude_layers, config),
                "adapter": nn.Linear(2 * config.width, config.width, bias=False),
                "core_block": _blocks(config.core_layers, config),
                "coda": _blocks(config.coda_layers, config),
                "ln_f": RMSNorm(config.width, config.norm_eps),
            }
        )
        self.lm_head = None if config.tie_embeddings else VocabTable(config.vocab_size, config.width)
        self.rotary = RotaryTable(config.context_length, config.head_width, config.rope_base)
        self.embed_scale = math.sqrt(config.width)
        self.register_load_state_dict_pre_hook(_drop_derived_entries)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        steps: tuple[int, int] | None = None,
        initial_state: Tensor | None = None,
        generator_key: tuple[int, ...] | None = None,
        state_scale: float = 1.0,
        with_stats: bool = False,
        return_logits: bool = False,
    ) -> ModelOutput:
        """Runs the model on input_ids [B, T].

        labels [B, T]     target of each position (already shifted); the loss is the mean over those that are not -100.
        steps (n, k)      iterations without and with gradient; None: the mean recurrence, all without gradient.
        initial_state     s_0 [B, T, C]; None draws it, times state_scale (0 gives zeros).
        generator_key     what the draw depends on: (seed, global step, micro step, rank); None: torch's generator.
        with_stats        adds health statistics of the recurrence. return_logits: logits also when there are labels.
        """
        rotary = self.rotary(input_ids.shape[1])
        embedded = self.encode(input_ids, rotary)
        if initial_state is None:
            shape = (*input_ids.shape, self.config.width)
            initial_state = draw_state(shape, embedded, generator_key, state_scale)
        n_no_grad, k_grad = steps if steps is not None else (self.config.mean_recurrence, 0)
        state, previous = self.recur(initial_state.to(embedded.dtype), embedded, rotary, n_no_grad, k_grad)
        stats = state_statistics(state, previous, embedded) if with_stats else None
        hidden = self.decode(self.transformer["ln_f"](state), rotary)
        loss = self.head(hidden, labels) if labels is not None else None
        logits = self.head(hidden) if labels is None or return_logits else None
        return ModelOutput(loss, logits, stats)

    def encode(self, tokens: Tensor, rotary: Tensor, caches: Iterable[KeyValueStore | None] | None = None) -> Tensor:
        """The prelude: tokens [B, T] to e [B, T, C]."""
        x = self.transformer["wte"](tokens) * self.embed_scale
        return _run(self.transformer["prelude"], x, rotary, caches)

    def iterate(
        self, state: Tensor, embedded: Tensor, rotary: Tensor, caches: Iterable[KeyValueStore | None] | None = None
    ) -> Tensor:
        """One core iteration: s_{i-1} and e, both [B, T, C], to s_i."""
        x = self.transformer["adapter"](torch.cat((state, embedded), dim=-1))
        return _run(self.transformer["core_block"], x, rotary, caches)

    def recur(
        self, state: Tensor, embedded: Tensor, rotary: Tensor, n_no_grad: int, k_grad: int
    ) -> tuple[Tensor, Tensor]:
        """Truncated recurrence: s_r and s_{r-1}; gradient reaches only the last k_grad iterations and their e."""
        previous = state
        with torch.no_grad(), _uncached_autocast(state.device.type):
            for _ in range(n_no_grad):
                previous, state = state, self.iterate(state, embedded, rotary)
        for _ in range(k_grad):
            previous = state
            if self.activation_checkpointing and torch.is_grad_enabled():
                # Non-reentrant: one autograd graph, so reused weights accumulate one gradient (ZeRO-2 and 3 need that).
                state = checkpoint(self.iterate, state, embedded, rotary, use_reentrant=False, preserve_rng_state=False)
            else:
                state = self.iterate(state, embedded, rotary)
        return state, previous

    def decode(self, latent: Tensor, rotary: Tensor, caches: Iterable[KeyValueStore | None] | None = None) -> Tensor:
        """The coda: ln_f(s_r) [B, T, C] to what the head reads."""
        return self.transformer["ln_f"](_run(self.transformer["coda"], latent, rotary, caches))

    def head(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """Float32 logits [B, T, V], or the loss where there are labels."""
        table = self.transformer["wte"] if self.lm_head is None else self.lm_head
        return table(hidden=hidden, labels=labels)


def compile_blocks(model: RecurrentLM, backend: str = "inductor", mode: str | None = None) -> None:
    """Compiles every block in place. All blocks share their graphs, and the recurrence count is not part of them.

    There is one graph with gradient and one without, each for a fixed shape of the micro-batch.
    """
    for part in ("prelude", "core_block", "coda"):
        for block in model.transformer[part]:
            block.compile(backend=backend, dynamic=False, fullgraph=True, mode=mode)


def _blocks(count: int, config: ModelSection) -> nn.ModuleList:
    return nn.ModuleList(SandwichBlock(config) for _ in range(count))


def _run(
    blocks: Iterable[nn.Module], x: Tensor, rotary: Tensor, caches: Iterable[KeyValueStore | None] | None
) -> Tensor:
    if caches is None:
        for block in blocks:
            x = block(x, rotary)
        return x
    for block, cache in zip(blocks, caches, strict=True):
        x = block(x, rotary, cache)
    return x


def _uncached_autocast(device: str) -> AbstractContextManager[Any]:
    """Keeps autocast from caching casts made without gradient, which older torch reuses in the graded iterations."""
    dtype = autocast_dtype(device)
    return nullcontext() if dtype is None else torch.autocast(device, dtype=dtype, cache_enabled=False)


def _drop_derived_entries(model: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Reference checkpoints hold the rotary table, and some the tied head a second time; both follow from the rest."""
    state.pop(prefix + "freqs_cis", None)
    if getattr(model, "lm_head", None) is None:
        state.pop(prefix + "lm_head.weight", None)
