"""What a rank costs before it trains: as ours start against DeepSpeed as it comes.

    python -m benchmarks.rank_start [--repeats 5] [--json]

A rank imports what it needs, makes an engine for a small model and does one step; nothing is compiled. Wall time,
processor time and memory of the whole process; medians of the repeats, taken in turn, and their ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

from benchmarks.machine import CHECKOUT, description

WAYS = ("DeepSpeed as it comes", "without_compiler")
MODEL = ("vocab_size=320", "context_length=32", "width=32", "heads=2", "mlp_width=64", "mean_recurrence=3")


def rank(way: str, began: float) -> None:
    """Makes an engine, does a step and prints what it took since `began` (Unix time)."""
    import torch

    import training.job  # noqa: F401 - all that a rank imports
    from training.config import load_config
    from training.distributed import join
    from training.eager import without_compiler
    from training.engine import Engine, EngineSettings
    from training.latent import TRAINING, latent_states

    if way == WAYS[1]:
        without_compiler()
    config = load_config(None, ["training.optimizer=adamw", *(f"model.{value}" for value in MODEL)])
    engine = Engine(config, EngineSettings("fp32", 1, 1, 1, False), join("gloo", "env://", "cpu", 60))
    tokens = torch.zeros(1, config.model.context_length, dtype=torch.long)
    state = latent_states(1, TRAINING, range(1), tokens.shape[1], config.model.width, torch.empty(0))
    engine.micro_step(tokens, tokens, True, steps=(1, 2), initial_state=state)
    engine.finish_step(1e-3)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps([time.time() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]))
    torch.distributed.destroy_process_group()


def start(way: str) -> list[float]:
    """Starts one rank; returns its seconds, processor seconds and MiB at most."""
    single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29587"}
    here = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "benchmarks.rank_start", "--rank", way, str(time.time())]
    done = subprocess.run(
        command,
        cwd=CHECKOUT,
        env={**os.environ, **single, **here},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    measured: list[float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank[0], float(options.rank[1]))
        return 0
    for way in WAYS:
        start(way)  # what the disk has to bring is not measured
    rounds = [{way: start(way) for way in WAYS} for _ in range(options.repeats)]
    medians = {
        way: [statistics.median(values) for values in zip(*(r[way] for r in rounds), strict=True)] for way in WAYS
    }
    peer, own = (medians[way] for way in WAYS)
    ratios = [round(ours / theirs, 2) for ours, theirs in zip(own, peer, strict=True)]
    if options.json:
        print(json.dumps({"machine": description(), "columns": ["s", "cpu_s", "MiB"], **medians, "ratio": ratios}))
        return 0
    print(description())
    for way, (seconds, processor, memory) in medians.items():
        print(f"{way:24s} {seconds:6.2f} s   {processor:6.2f} s of processor time   {memory:6.0f} MiB")
    print(f"{'ratio':24s} {ratios[0]:6.2f}     {ratios[1]:6.2f}                       {ratios[2]:6.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
