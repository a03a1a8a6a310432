"""How fast the nodes sum a tensor together: `python -m training.bandwidth`, one process a node, before a run.

Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Rank 0 prints JSON with the bus bandwidth, as nccl-tests define it:
2 (n - 1) / n times the bytes of the tensor over the seconds of one all-reduce.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time

import torch
import torch.distributed as dist

TENSOR_BYTES = 16 * 2**20
REPEATS = 5
TIMEOUT_S = 60


def bus_bandwidth(tensor_bytes: int, seconds: float, ranks: int) -> float:
    """Returns bytes a second over the slowest link of a ring."""
    return 2 * (ranks - 1) / ranks * tensor_bytes / seconds


def main() -> int:
    """Measures and prints; exit code 1 when the sum is wrong."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=TIMEOUT_S))
    ranks = dist.get_world_size()
    values = torch.ones(TENSOR_BYTES // 4, device=device)
    dist.all_reduce(values)  # connects
    right = bool((values == ranks).all())
    began = time.perf_counter()
    for _ in range(REPEATS):
        dist.all_reduce(values)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / REPEATS
    if dist.get_rank() == 0:
        rate = bus_bandwidth(TENSOR_BYTES, seconds, ranks)
        print(json.dumps({"backend": backend, "bytes_per_s": rate, "right": right}), flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # No teardown that waits for a rank that is gone.
    os._exit(code)
