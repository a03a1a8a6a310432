"""Ranks: how they meet, and the few collectives that the loop itself needs."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from training.errors import LoopworksError


@dataclass(frozen=True)
class RankInfo:
    """Which rank this process is."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """True on the rank that writes the run folder."""
        return self.rank == 0


def join(backend: str, init_method: str, device: str, timeout_s: float) -> RankInfo:
    """Joins the other ranks (RANK, LOCAL_RANK, WORLD_SIZE and MASTER_* come from the node agent).

    Raises LoopworksError when they cannot be reached.
    """
    rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    place = torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")
    if place.type == "cuda":
        torch.cuda.set_device(place)
    try:
        dist.init_process_group(
            backend,
            init_method=init_method,
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=place if place.type == "cuda" else None,
        )
    except (RuntimeError, ValueError) as error:
        raise LoopworksError(
            f"rank {rank} of {world_size} could not join by {backend} at {init_method}: {str(error).splitlines()[0]}",
            "check distributed.backend and distributed.init_method, and that the port is free and reachable",
        ) from error
    return RankInfo(rank, local_rank, world_size, place)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Returns the sum of `values` over all ranks; a collective."""
    dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


def any_rank(flag: bool, device: torch.device) -> bool:
    """True on all ranks when it is true on one of them; a collective, so call it on all."""
    vote = torch.tensor(float(flag), device=device)
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    return bool(vote.item())


def leave() -> None:
    """Ends the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
