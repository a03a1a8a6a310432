"""What a save costs the step loop: ours against DeepSpeed's own save_checkpoint and torch's asynchronous DCP save.

    python -m benchmarks.checkpoint [--parameters 8_000_000] [--stage 1] [--rounds 5] [--json]

One process, one engine, the three kinds in turn in every round, so that load on the machine hits all alike; ratios are
what counts. The steps after each save are timed as well: what is written beside training takes time from them. Exit
code 1 when our stall is longer than that of one of the peers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.machine import description, torchrun
from training.checkpoint.ranks import OneRank
from training.checkpoint.saver import Identity, Saver
from training.checkpoint.state import SavedProgress
from training.config import ModelSection
from training.model.init import init_weights
from training.model.recurrent import RecurrentLM


def build(width: int, stage: int) -> Any:
    """Returns a DeepSpeed engine of a recurrent model of this width."""
    model_config = ModelSection(
        preset=None,
        vocab_size=4096,
        context_length=64,
        width=width,
        heads=8,
        mlp_width=width * 3,
        prelude_layers=1,
        core_layers=2,
        coda_layers=1,
        mean_recurrence=4,
        backprop_depth=2,
    )
    model = RecurrentLM(model_config)
    init_weights(model, model_config, 0)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        config={
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 8,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
            "steps_per_print": None,
        },
    )
    return engine


def step(engine: Any) -> float:
    """Takes one optimizer step and returns its seconds."""
    started = time.perf_counter()
    tokens = torch.randint(0, 4096, (8, 65))
    loss = engine(tokens[:, :-1], tokens[:, 1:], steps=(2, 2)).loss
    engine.backward(loss)
    engine.step()
    return time.perf_counter() - started


def plain_deepspeed(engine: Any, folder: Path) -> Callable[[], None]:
    """DeepSpeed as it comes: everything is written before it returns, nothing is flushed, hashed or committed."""
    engine.save_checkpoint(str(folder), tag="plain")
    return lambda: None


def torch_dcp(engine: Any, folder: Path) -> Callable[[], None]:
    """torch.distributed.checkpoint.async_save of the same tensors."""
    state = {"module": engine.module.state_dict(), "optimizer": _tensors(engine.optimizer.state_dict())}
    future = dcp.async_save(state, checkpoint_id=str(folder))
    return lambda: (future.result(), None)[1]


def _tensors(value: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of nested state under flat names, as DCP wants them."""
    if isinstance(value, torch.Tensor):
        return {prefix: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return {name: t for key, item in items for name, t in _tensors(item, f"{prefix}.{key}").items()}


def measure(engine: Any, save: Callable[[], Callable[[], None]], normal_s: float) -> dict[str, float]:
    """Returns the stall of one save, what the steps beside its writing lost, and the seconds until it is on disk."""
    started = time.perf_counter()
    wait = save()
    stall_s = time.perf_counter() - started
    beside_s = sum(step(engine) for _ in range(3))
    wait()
    total_s = time.perf_counter() - started
    return {"stall_s": stall_s, "slowed_s": max(0.0, beside_s - 3 * normal_s), "total_s": total_s}


def run(parameters: int, stage: int, rounds: int) -> dict[str, Any]:
    """Measures all kinds in turn and returns medians and ratios."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    width = max(64, round((parameters / 60) ** 0.5 / 16) * 16)
    engine = build(width, stage)
    theirs = engine.checkpoint_engine
    root = Path(tempfile.mkdtemp(prefix="checkpoint-benchmark-"))
    saver = Saver(engine, root / "ours", OneRank(), Identity("c", "t"))
    ours = engine.checkpoint_engine
    normal_s = statistics.median(step(engine) for _ in range(5))
    results: dict[str, list[dict[str, float]]] = {"loopworks": [], "deepspeed": [], "dcp_async": []}
    size = 0
    for number in range(rounds + 1):
        engine.checkpoint_engine = ours

        def save_ours(at: int = number) -> Callable[[], None]:
            saver.save(SavedProgress(at + 1, 0, 0))
            return saver.wait

        once = {"loopworks": measure(engine, save_ours, normal_s)}
        (result,) = saver.poll()
        assert result.ok, result.error
        size = result.size_bytes
        engine.checkpoint_engine = theirs
        once["deepspeed"] = measure(engine, lambda: plain_deepspeed(engine, root / "plain"), normal_s)
        target = root / f"dcp-{number}"
        once["dcp_async"] = measure(engine, lambda to=target: torch_dcp(engine, to), normal_s)  # type: ignore[misc]
        if number:  # the first round makes buffers and folders
            for kind, values in once.items():
                results[kind].append(values)
        for folder in root.iterdir():
            shutil.rmtree(folder)
    saver.close()
    dist.destroy_process_group()
    shutil.rmtree(root)
    count = sum(p.numel() for p in engine.module.parameters())
    return summary(results, normal_s, size, count, stage)


def summary(
    results: dict[str, list[dict[str, float]]], normal_s: float, size: int, count: int, stage: int
) -> dict[str, Any]:
    """Medians of each kind, and the ratios of ours to the others."""
    medians = {
        kind: {key: statistics.median(r[key] for r in rows) for key in rows[0]} for kind, rows in results.items()
    }
    ours = medians["loopworks"]
    return {
        "parameters": count,
        "zero_stage": stage,
        "checkpoint_bytes": size,
        "step_s": normal_s,
        "median": medians,
        "stall_ratio": {k: ours["stall_s"] / medians[k]["stall_s"] for k in ("deepspeed", "dcp_async")},
        "stall_in_steps": {k: m["stall_s"] / normal_s for k, m in medians.items()},
        "interval_for_5_percent_steps": ours["stall_s"] / normal_s / 0.05,
    }


def main() -> int:
    """Prints the result as a table or JSON, with commit and machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=8_000_000)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        return torchrun("benchmarks.checkpoint", 1, sys.argv[1:])
    result = run(arguments.parameters, arguments.stage, arguments.rounds)
    result["machine"] = description()
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)
    return 1 if max(result["stall_ratio"].values()) > 1 else 0


def show(result: dict[str, Any]) -> None:
    """Prints a result for people."""
    size_mib = result["checkpoint_bytes"] / 2**20
    print(result["machine"])
    print(f"{result['parameters']:,} parameters, ZeRO-{result['zero_stage']}, {size_mib:.0f} MiB a checkpoint")
    print(f"a step takes {result['step_s'] * 1000:.0f} ms")
    for kind, values in result["median"].items():
        stall, slowed, total = (values[key] * 1000 for key in ("stall_s", "slowed_s", "total_s"))
        print(f"{kind:>10}: stall {stall:7.1f} ms, steps beside lose {slowed:7.1f} ms, on disk after {total:7.0f} ms")
    for kind, ratio in result["stall_ratio"].items():
        print(f"our stall is {ratio:.2f} of {kind}'s")
    print(f"a stall under 5 % of the time needs an interval of {result['interval_for_5_percent_steps']:.1f} steps")


if __name__ == "__main__":
    sys.exit(main())
