"""Time from the command to the first training step: fab train against plain torchrun and the `deepspeed` launcher.

    python benchmarks/launch.py [--repeats 3] [--json FILE]

All three start the same module with the same run folder contents and two ranks on this machine; the median of the
repeats, taken in turn, as ratios to torchrun. The end of a run is not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.processes import end_processes_of
from launch.request import CHECKOUT, TrainRequest, prepare_run
from launch.runs import create_run
from training.records import RunFolder

BIN = Path(sys.executable).parent
LIMIT_S = 180
CONFIG = """
model: {{preset: null, vocab_size: 320, context_length: 32, width: 32, heads: 2, mlp_width: 64,
        prelude_layers: 1, core_layers: 1, coda_layers: 1, mean_recurrence: 3, backprop_depth: 2}}
data: {{path: {folder}/data}}
training: {{batch_size: 8, max_steps: 100000, lr_schedule: constant, precision: fp32}}
distributed: {{ranks_per_node: 2}}
monitoring: {{log_interval_steps: 1}}
run: {{dir: {folder}/runs}}
"""


def prepare_data(folder: Path) -> None:
    """Makes a dataset of a few hundred sequences from this project's own sources."""
    texts = folder / "texts"
    texts.mkdir()
    for number, path in enumerate(sorted((CHECKOUT / "training").glob("*.py"))):
        (texts / f"{number}.txt").write_text(path.read_text())
    command = [sys.executable, "-m", "training.data", "prepare", "--source", str(texts), "--out", str(folder / "data")]
    command += ["--vocab-size", "320", "--seq-len", "32", "--workers", "1", "--set", "prepare.validation_fraction=0.2"]
    subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True, timeout=LIMIT_S)


def first_step_s(command: Sequence[str], environment: Mapping[str, str], run: RunFolder) -> float:
    """Returns the seconds from the start of `command` to the first step in metrics.jsonl, then ends the run."""
    began = time.time()
    process = subprocess.Popen(
        command,
        cwd=CHECKOUT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while not (metrics := run.read_metrics()):
            if process.poll() is not None or time.time() - began > LIMIT_S:
                raise SystemExit(f"{command[0]} did not reach a step; see {run.logs}")
            time.sleep(0.02)
        return metrics[0].time - began
    finally:
        end_processes_of(str(run.path), 0.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def measure(way: str, config: Path, name: str) -> float:
    """Starts one run in one of the three ways."""
    if way == "fab train":
        run = RunFolder(config.parent / "runs" / name)
        command = [str(BIN / "fab"), "train", "--config", str(config), "--name", name, "--json"]
        return first_step_s(command, {}, run)
    prepared = prepare_run(TrainRequest(str(config), name=name))
    run = create_run(prepared.config, prepared.plan_file(), prepared.plan.total_steps)
    (spec,) = prepared.specs(str(run.path), console=False)
    if way == "torchrun":
        command = [str(BIN / "torchrun"), "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
        return first_step_s([*command, "-m", "training"], spec.env, run)
    command = [
        str(BIN / "deepspeed"),
        "--num_gpus",
        "2",
        "--no_local_rank",
        "--master_port",
        "0",
        "--module",
        "training",
    ]
    command[command.index("0")] = str(29600 + os.getpid() % 300)
    return first_step_s(command, spec.env, run)


def main() -> int:
    """Prints seconds and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ways = ("torchrun", "fab train", "deepspeed")
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "config.yaml"
        config.write_text(CONFIG.format(folder=folder))
        prepare_data(folder)
        measure("torchrun", config, "warm-up")
        for repeat in range(options.repeats):
            for way in ways:
                seconds[way].append(measure(way, config, f"{way.replace(' ', '-')}-{repeat}"))
    medians = {way: round(statistics.median(values), 2) for way, values in seconds.items()}
    report = {
        "first_step_s": medians,
        "ratio_to_torchrun": {way: round(value / medians["torchrun"], 2) for way, value in medians.items()},
        "repeats": options.repeats,
    }
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
