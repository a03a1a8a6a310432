"""Tokens per second of a training step: the ZeRO engine against a plain PyTorch DDP loop over the same model.

    python -m benchmarks.train_step [--precision fp32|bf16] [--compile] [--rounds N]

Both take turns in one process on two ranks, with the same optimizer, clipping, batches and iterations; the printed
ratio is the median over the rounds, so that a busy machine disturbs both alike. In bf16 the engine keeps bf16 weights
with fp32 master weights, and the peer runs autocast, which is what a plain loop would do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

from benchmarks.machine import description, torchrun

RANKS = 2
STEPS_A_ROUND = 4
ITERATIONS = (3, 2)
MICRO_BATCH = 16


def engine_step(precision: str, stage: int, compiled: bool) -> Callable[[], None]:
    """Returns a function that does one optimizer step of the engine."""
    import torch

    from training.config import load_config
    from training.distributed import RankInfo
    from training.engine import Engine, EngineSettings
    from training.latent import TRAINING, latent_states

    config = load_config(None, ["training.optimizer=adamw"])
    rank = RankInfo(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), RANKS, torch.device("cpu"))
    engine = Engine(config, EngineSettings(precision, stage, MICRO_BATCH, 1, compiled), rank)
    tokens, labels = batch(config.model.vocab_size, config.model.context_length)
    like = torch.empty(0)

    def step() -> None:
        state = latent_states(1, TRAINING, range(MICRO_BATCH), tokens.shape[1], config.model.width, like)
        output = engine.micro_step(tokens, labels, True, steps=ITERATIONS, initial_state=state)
        engine.finish_step(1e-4)
        assert output.loss is not None
        float(output.loss)

    return step


def ddp_step(precision: str, compiled: bool) -> Callable[[], None]:
    """Returns a function that does one optimizer step of a plain DDP loop."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from training.config import load_config
    from training.latent import TRAINING, latent_states
    from training.model.init import init_weights
    from training.model.recurrent import RecurrentLM, compile_blocks
    from training.optim import build_optimizer

    config = load_config(None, ["training.optimizer=adamw"])
    model = RecurrentLM(config.model)
    init_weights(model, config.model, 42)
    if compiled:
        compile_blocks(model)
    wrapped = DistributedDataParallel(model)
    optimizer = build_optimizer(model, config.training)
    tokens, labels = batch(config.model.vocab_size, config.model.context_length)
    like = torch.empty(0)

    def step() -> None:
        state = latent_states(1, TRAINING, range(MICRO_BATCH), tokens.shape[1], config.model.width, like)
        with torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext():
            output = wrapped(tokens, labels, steps=ITERATIONS, initial_state=state)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        float(output.loss)

    return step


def batch(vocab_size: int, length: int) -> tuple[object, object]:
    """Returns the same random micro-batch on each call."""
    import torch

    block = torch.randint(0, vocab_size, (MICRO_BATCH, length + 1), generator=torch.Generator().manual_seed(0))
    return block[:, :-1].contiguous(), block[:, 1:].contiguous()


def seconds(step: Callable[[], None]) -> float:
    """Returns the seconds of STEPS_A_ROUND steps, from and to a moment that the ranks share."""
    import torch.distributed as dist

    dist.barrier()
    began = time.perf_counter()
    for _ in range(STEPS_A_ROUND):
        step()
    dist.barrier()
    return time.perf_counter() - began


def worker(options: argparse.Namespace) -> None:
    """Runs on each rank; rank 0 prints."""
    from training.config import load_config
    from training.distributed import join, leave

    join("gloo", "env://", "cpu", 300)
    contestants = {
        "DDP": ddp_step(options.precision, False),
        "ZeRO-1": engine_step(options.precision, 1, False),
    }
    if options.compile:
        contestants["ZeRO-1, compiled"] = engine_step(options.precision, 1, True)
    for step in contestants.values():
        seconds(step)  # warm-up and compilation
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(options.rounds):
        # The order changes from round to round: whoever comes first may find colder caches.
        names = list(contestants)[turn % len(contestants) :] + list(contestants)[: turn % len(contestants)]
        for name in names:
            times[name].append(seconds(contestants[name]))
    if os.environ["RANK"] == "0":
        tokens = STEPS_A_ROUND * MICRO_BATCH * RANKS * load_config().model.context_length
        for name, measured in times.items():
            ratios = [ddp / own for ddp, own in zip(times["DDP"], measured, strict=True)]
            print(
                f"{options.precision} {name:18s} {tokens / statistics.median(measured):8,.0f} tokens/s   "
                f"ratio to DDP {statistics.median(ratios):.2f}",
                flush=True,
            )
    leave()


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--compile", action="store_true", help="measure compiled blocks too")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    if "RANK" in os.environ:
        worker(options)
        sys.stdout.flush()
        os._exit(0)
    print(description())
    arguments = ["--precision", options.precision, "--rounds", str(options.rounds)]
    return torchrun("benchmarks.train_step", RANKS, arguments + (["--compile"] if options.compile else []))


if __name__ == "__main__":
    sys.exit(main())
