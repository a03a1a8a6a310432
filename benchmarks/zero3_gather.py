"""Bytes that ZeRO-3 gathers in an optimizer step, by recurrence count, counted by DeepSpeed's comms logger.

    python -m benchmarks.zero3_gather

Peer: the same engine without holding the core (DeepSpeed's own behaviour). Exit code 1 when the bytes at the largest
r exceed those at the smallest by more than 5 %.
"""

from __future__ import annotations

import argparse
import os
import sys

from benchmarks.machine import description, torchrun

LIMIT = 1.05
RANKS = 2
OVERRIDES = (
    "model.vocab_size=512",
    "model.context_length=64",
    "model.width=128",
    "model.heads=4",
    "model.mlp_width=384",
    "model.backprop_depth=4",
    "training.batch_size=8",
    "training.precision=fp32",
    "distributed.zero_stage=3",
)


def gathered_bytes(recurrences: list[int], hold: bool, checkpointing: bool) -> dict[int, int]:
    """Returns the bytes all-gathered by one step at each recurrence count.

    The step before each measured one runs another r, as in training: two equal ones in a row would let DeepSpeed use
    its prefetch trace, and the first step of all does some set-up.
    """
    import deepspeed.comm
    import torch

    from training.config import load_config
    from training.distributed import RankInfo
    from training.engine import Engine, EngineSettings

    mode = "per_iteration" if checkpointing else "none"
    config = load_config(None, [*OVERRIDES, f"training.activation_checkpointing={mode}"])
    rank = RankInfo(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), RANKS, torch.device("cpu"))
    engine = Engine(config, EngineSettings("fp32", 3, 2, 2, compile=False), rank)
    if not hold:
        engine._hold = None
    deepspeed.comm.configure(enabled=True, prof_all=True, verbose=False, debug=False)
    logger = deepspeed.comm.comm.comms_logger
    counted = {}
    for r in [recurrences[-1], *recurrences]:
        logger.comms_dict.clear()
        for micro in range(2):
            tokens = torch.randint(0, 512, (2, 65), generator=torch.Generator().manual_seed(micro))
            engine.micro_step(tokens[:, :-1], tokens[:, 1:], last=micro == 1, steps=(max(r - 4, 0), min(r, 4)))
        engine.finish_step(1e-3)
        counted[r] = sum(
            size * values[0]
            for operation, sizes in logger.comms_dict.items()
            if "gather" in operation
            for size, values in sizes.items()
        )
    engine.deepspeed.destroy()
    return counted


def worker(recurrences: list[int]) -> None:
    """Runs on each rank; rank 0 prints."""
    from training.distributed import join, leave

    join("gloo", "env://", "cpu", 120)
    print_here = os.environ["RANK"] == "0"
    failed = False
    for label, hold, checkpointing in (
        ("DeepSpeed alone", False, False),
        ("core held", True, False),
        ("DeepSpeed alone, checkpointing", False, True),
        ("core held, checkpointing", True, True),
    ):
        counted = gathered_bytes(recurrences, hold, checkpointing)
        ratio = counted[recurrences[-1]] / counted[recurrences[0]]
        failed |= hold and ratio > LIMIT
        if print_here:
            sizes = "  ".join(f"r={r}: {counted[r] / 2**20:.2f} MiB" for r in recurrences)
            print(f"{label:32s} {sizes}  ratio {ratio:.3f}", flush=True)
    leave()
    sys.stdout.flush()
    os._exit(int(failed))  # every rank has the same answer


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recurrences", default="4,8,16,32", help="comma-separated, smallest first")
    options = parser.parse_args()
    if "RANK" in os.environ:
        worker([int(r) for r in options.recurrences.split(",")])
    print(description())
    return 1 if torchrun("benchmarks.zero3_gather", RANKS, ["--recurrences", options.recurrences]) else 0


if __name__ == "__main__":
    sys.exit(main())
