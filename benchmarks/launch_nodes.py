"""What `fab train --nodes` costs over bare torchrun on the same nodes: seconds from the command to the first step.

    python benchmarks/launch_nodes.py --nodes a,b --config small.yaml [--repeats 3] [--ssh-config FILE] [--json FILE]

Bare: one `ssh NODE torchrun ...` a node by hand, at once, with the environment and the run folder that fab would have
made, the code being there already. Both run to their end; only the way to the first step is timed. The configuration
has its data and run.dir on storage that the nodes and this machine share, and few steps.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.cluster import ClusterRequest, prepare_cluster
from launch.mpi import send_code
from launch.request import CHECKOUT, TrainRequest
from launch.runs import create_run
from training.records import RunFolder

FAB = Path(sys.executable).with_name("fab")
LIMIT_S = 180


def fab_first_step_s(config: str, nodes: str, name: str, ssh_config: str | None, runs: Path) -> float:
    """Runs `fab train` and returns the seconds from the command to its first step."""
    command = [str(FAB), "train", "--nodes", nodes, "--config", config, "--name", name, "--json"]
    command += ["--ssh-config", ssh_config] if ssh_config else []
    began = time.time()
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(f"fab train ended with {done.returncode}: {done.stderr}")
    return RunFolder(runs / name).read_metrics()[0].time - began


def bare_first_step_s(config: str, nodes: str, name: str, ssh_config: str | None) -> float:
    """Starts torchrun on each node over ssh and returns the seconds from then to the first step."""
    cluster = ClusterRequest(nodes, ssh_config=ssh_config)
    prepared = prepare_cluster(TrainRequest(config, name=name), cluster)
    send_code(prepared)
    run = create_run(prepared.config, prepared.plan_file(), prepared.plan.total_steps)
    ssh = ["ssh", *(["-F", ssh_config] if ssh_config else []), "-o", "BatchMode=yes"]
    began = time.time()
    started = [
        subprocess.Popen(
            [*ssh, spec.node, bare_command(dict(spec.env), spec.argv, spec.directory)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for spec in prepared.specs(str(run.path), console=False)
    ]
    codes = [process.wait(LIMIT_S) for process in started]
    if any(codes):
        raise SystemExit(f"torchrun ended with {codes}; see {run.logs}")
    return run.read_metrics()[0].time - began


def bare_command(environment: dict[str, str], argv: tuple[str, ...], directory: str) -> str:
    """Returns what one would type by hand."""
    words = [f"{name}={value}" for name, value in environment.items()]
    return f"cd {shlex.quote(directory)} && exec env {shlex.join([*words, *argv])}"


def compare(config: str, nodes: str, ssh_config: str | None, runs: Path, repeats: int) -> dict[str, object]:
    """Measures both ways in turn; the first start of fab sends the code and is not counted."""
    ssh_config = ssh_config or os.environ.get("LOOPWORKS_SSH_CONFIG")
    stamp = f"{os.getpid()}"
    fab_first_step_s(config, nodes, f"warm-{stamp}", ssh_config, runs)
    seconds: dict[str, list[float]] = {"torchrun": [], "fab train": []}
    for repeat in range(repeats):
        seconds["torchrun"].append(bare_first_step_s(config, nodes, f"bare-{stamp}-{repeat}", ssh_config))
        seconds["fab train"].append(fab_first_step_s(config, nodes, f"fab-{stamp}-{repeat}", ssh_config, runs))
    medians = {way: round(statistics.median(values), 2) for way, values in seconds.items()}
    overhead = statistics.median(seconds["fab train"]) - statistics.median(seconds["torchrun"])
    return {
        "first_step_s": medians,
        "all_s": {way: [round(value, 2) for value in values] for way, values in seconds.items()},
        "overhead_s": round(overhead, 2),
        "ratio_to_torchrun": round(medians["fab train"] / medians["torchrun"], 2),
        "nodes": nodes,
        "machine": f"{os.cpu_count()} cores",
    }


def main() -> int:
    """Prints seconds, overhead and ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--ssh-config")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from training.config import load_config

    runs = Path(load_config(options.config).run.dir).absolute()
    report = compare(options.config, options.nodes, options.ssh_config, runs, options.repeats)
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
