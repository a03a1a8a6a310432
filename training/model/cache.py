"""Keys and values of past tokens while generating: one entry a token for every block of prelude and coda, and for every
(iteration, block) of the core.

Tokens may have run different numbers of iterations (adaptive exit): a token that lacks iteration i is read at its
deepest one. With a budget, iteration i uses slot i mod budget and overwrites what an earlier iteration left there, so
the memory does not grow with the recurrence (arXiv 2502.05171, section 6.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from training.config.schema import ModelSection


class DecodingCache:
    """Cache of one sequence: new tokens are written behind the finished ones until `finish` counts them in."""

    def __init__(
        self, config: ModelSection, capacity: int, recurrence: int, kv_budget: int | None, like: Tensor
    ) -> None:
        """Room for `capacity` tokens and up to `recurrence` iterations, with the type and device of `like`."""
        self.slots = min(recurrence, kv_budget or recurrence)
        self.length = 0
        self.depth = torch.zeros(capacity, dtype=torch.long, device=like.device)
        shape = (1, config.heads, capacity, config.head_width)
        self.prelude = [_Store(self, 1, shape, like) for _ in range(config.prelude_layers)]
        self.coda = [_Store(self, 1, shape, like) for _ in range(config.coda_layers)]
        self._core = [_Store(self, self.slots, shape, like) for _ in range(config.core_layers)]

    def core(self, iteration: int) -> list[_SlotView]:
        """The stores of the core blocks for one iteration, counted from 0."""
        return [_SlotView(store, iteration % self.slots) for store in self._core]

    def finish(self, tokens: int, iterations: int) -> None:
        """Counts the last `tokens` in as past tokens that ran `iterations` iterations."""
        self.depth[self.length : self.length + tokens] = iterations
        self.length += tokens

    def bytes(self) -> int:
        """Memory held by keys and values."""
        return sum(store.keys.nbytes + store.values.nbytes for store in (*self.prelude, *self.coda, *self._core))


class _Store:
    """Keys and values of one block: [slots, 1, H, capacity, D]."""

    def __init__(self, cache: DecodingCache, slots: int, shape: tuple[int, ...], like: Tensor) -> None:
        self.cache = cache
        self.keys = torch.zeros(slots, *shape, dtype=like.dtype, device=like.device)
        self.values = torch.zeros_like(self.keys)

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes into the only slot of a prelude or coda block and reads all tokens."""
        return _SlotView(self, 0).extend(keys, values)


class _SlotView:
    """One slot of a block, as attention sees it in one iteration."""

    def __init__(self, store: _Store, slot: int) -> None:
        self.store, self.slot = store, slot

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the new tokens' keys and values [1, H, T, D]; returns those of all tokens, in the type of the new."""
        start = self.store.cache.length
        end = start + keys.shape[2]
        self.store.keys[self.slot, :, :, start:end] = keys.to(self.store.keys.dtype)
        self.store.values[self.slot, :, :, start:end] = values.to(self.store.values.dtype)
        # Slots fill in order, so a token that ran d iterations has slots 0 .. d - 1; its deepest is d - 1.
        slots = (self.store.cache.depth[:start] - 1).clamp(max=self.slot)
        if bool((slots == self.slot).all()):
            return (
                self.store.keys[self.slot, :, :, :end].to(keys.dtype),
                self.store.values[self.slot, :, :, :end].to(values.dtype),
            )
        slots = torch.cat((slots, slots.new_full((end - start,), self.slot)))
        tokens = torch.arange(end, device=slots.device)
        # Advanced indices apart from each other put their axis first: [tokens, 1, H, D].
        return (
            self.store.keys[slots, :, :, tokens].permute(1, 2, 0, 3).to(keys.dtype),
            self.store.values[slots, :, :, tokens].permute(1, 2, 0, 3).to(values.dtype),
        )
