"""How the ranks talk about a save beside training: a process group of their own, so that a thread may use it."""

from __future__ import annotations

import datetime
from typing import Any, Protocol

import torch.distributed as dist


class Ranks(Protocol):
    """What saving and resuming need to know of the other ranks."""

    rank: int
    world_size: int

    def gather(self, value: Any) -> list[Any]:
        """Returns the value of every rank, in rank order; a collective."""


class GlooRanks:
    """All ranks, over a gloo group that training does not use (gloo also where training uses NCCL:

    Only host data travels).

    Made by all ranks together. A thread may call `gather` while the main thread is in a collective of training, as
    long as each rank makes the calls on this group in the same order.
    """

    def __init__(self, timeout: datetime.timedelta = datetime.timedelta(hours=2)) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=timeout) if self.world_size > 1 else None

    def gather(self, value: Any) -> list[Any]:
        """Returns the value of every rank, in rank order."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values


class OneRank:
    """A run of one process."""

    rank = 0
    world_size = 1

    def gather(self, value: Any) -> list[Any]:
        """Returns the value alone."""
        return [value]
