"""`fab train` and the tasks around it, as a user calls them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from launch.processes import processes_of
from tests.system.conftest import CHECKOUT, Fab, fab_command
from training.records import RunFolder

pytestmark = pytest.mark.system

LONG = ("--set", "training.max_steps=100000", "--set", "training.lr_schedule=constant")


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {timeout_s} s"
        time.sleep(0.1)


@pytest.fixture
def long_run(tiny_config: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], RunFolder]]:
    """A run that has done its first steps and would go on for long."""
    process = subprocess.Popen(
        fab_command("train", "--config", str(tiny_config), "--name", "long", *LONG),
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    run = RunFolder(tmp_path / "runs" / "long")
    try:
        wait_for(lambda: len(run.read_metrics()) >= 2, "training step")
        yield process, run
    finally:
        if process.poll() is None:
            process.kill()
        # The ranks hold the pipes: they have to go before these can be read to their end.
        for left in processes_of(str(run.path)):
            left.kill()
        process.communicate()


def test_train_leaves_a_complete_run_that_the_other_tasks_read(fab: Fab, tiny_config: Path, tmp_path: Path) -> None:
    outcome = fab("train", "--config", str(tiny_config), "--name", "first", "--json", PYTHONPROFILEIMPORTTIME="1")
    assert outcome.returncode == 0, outcome.stderr
    result = json.loads(outcome.stdout)
    assert result["steps"] == 6
    assert result["tokens"] == 6 * 8 * 32
    assert set(result["perplexity"]) == {"1", "3"}
    assert result["unigram_perplexity"] > result["bigram_perplexity"] > 1
    assert result["sample"].startswith("The ")

    run = RunFolder(tmp_path / "runs" / "first")
    assert [record.step for record in run.read_metrics()] == [1, 2, 3, 4, 5, 6]
    assert {"start", "evaluation", "checkpoint", "end"} <= {event.kind for event in run.read_events()}
    assert run.read_state().phase == "finished"
    for path in (run.config, run.plan, run.log, run.rank_log(0), run.rank_log(1), run.result):
        assert path.stat().st_size, path
    imported = run.rank_log(1).read_text()
    assert "deepspeed.runtime.engine" in imported and "torch._dynamo." not in imported, "nothing is compiled"

    runs = str(tmp_path / "runs")
    (row,) = json.loads(fab("status", "--dir", runs, "--json").stdout)
    assert (row["name"], row["phase"], row["step"]) == ("first", "finished", 6)
    assert "first" in fab("status", "--dir", runs).stdout
    assert "step 6/6" in fab("logs", "--dir", runs).stdout
    assert "step 6/6" in fab("logs", "--dir", runs, "--follow").stdout
    assert "is not running" in fab("stop", "--dir", runs).stdout

    written = fab("generate", "--dir", runs, "--prompt", "The ", "--tokens", "5", "--json")
    assert written.returncode == 0, written.stderr
    assert json.loads(written.stdout)["prompt"] == "The "
    again = fab("generate", "--dir", runs, "--prompt", "The ", "--tokens", "5", "--exit", "kl")
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("The ")

    taken = fab("train", "--config", str(tiny_config), "--name", "first")
    assert taken.returncode == 2
    assert "already a run" in taken.stderr


def test_dry_run_prints_the_plan_and_starts_nothing(fab: Fab, tiny_config: Path, tmp_path: Path) -> None:
    outcome = fab("train", "--config", str(tiny_config), "--dry-run", "--json")
    assert outcome.returncode == 0, outcome.stderr
    answer = json.loads(outcome.stdout)
    assert answer["plan"]["world_size"] == 2
    assert answer["plan"]["total_steps"] == 6
    assert "torch.distributed.run" in answer["commands"][0]["argv"]
    assert not (tmp_path / "runs").exists()
    assert "micro-batch 4" in fab("train", "--config", str(tiny_config), "--dry-run").stdout


def test_mixture_is_planned_by_its_weights(fab: Fab, tiny_config: Path, tiny_dataset: Path) -> None:
    def steps(*overrides: str) -> int:
        words = [word for override in ("training.max_steps=null", *overrides) for word in ("--set", override)]
        outcome = fab("train", "--config", str(tiny_config), "--dry-run", "--json", *words)
        assert outcome.returncode == 0, outcome.stderr
        return int(json.loads(outcome.stdout)["plan"]["total_steps"])

    whole = steps()
    assert whole > 10
    assert steps(f"data.mixture={{{tiny_dataset}: 0.5}}") == pytest.approx(whole / 2, abs=1)


def test_values_with_quotes_and_semicolons_reach_the_run_unchanged(fab: Fab, tiny_config: Path, tmp_path: Path) -> None:
    prompt = "a; touch /tmp/x \"b\" $(id) 'c'"
    outcome = fab(
        "train", "--config", str(tiny_config), "--name", "q", "--json", "--set", f"evaluation.prompt={prompt}"
    )
    assert outcome.returncode == 0, outcome.stderr
    assert json.loads(outcome.stdout)["sample"].startswith(prompt)


def test_interrupt_saves_and_leaves_with_130(long_run: tuple[subprocess.Popen[str], RunFolder]) -> None:
    process, run = long_run
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert run.read_state().phase == "stopped"
    assert list(run.checkpoints.glob("step-*"))
    assert list(run.models.glob("step-*"))


def test_stop_saves_and_leaves_nothing(fab: Fab, long_run: tuple[subprocess.Popen[str], RunFolder]) -> None:
    process, run = long_run
    outcome = fab("stop", "--dir", str(run.path.parent))
    assert outcome.stdout == "run long has stopped\n"
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "fab train --resume long" in errors
    assert list(run.checkpoints.glob("step-*"))


def test_killed_rank_ends_the_run_with_a_message(long_run: tuple[subprocess.Popen[str], RunFolder]) -> None:
    process, run = long_run
    ranks = [p for p in processes_of(str(run.path)) if p.environ().get("RANK") == "1"]
    assert ranks
    for rank in ranks:
        rank.kill()
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 1
    assert "error: " in errors
    assert "next: " in errors
    assert "Traceback" not in errors
    assert run.read_state().phase == "failed"


def test_ranks_do_not_outlive_torchrun(long_run: tuple[subprocess.Popen[str], RunFolder]) -> None:
    process, run = long_run
    psutil.Process(run.read_state().launcher_pid).kill()
    process.communicate(timeout=90)
    assert process.returncode == 75, "the kernel tells the ranks, which save and leave"
    assert not processes_of(str(run.path))
    assert list(run.checkpoints.glob("step-*"))


def test_memory_limit_halves_the_micro_batch_and_the_run_goes_on(fab: Fab, tiny_config: Path, tmp_path: Path) -> None:
    limit = 2 * 2**30
    command = fab_command("train", "--config", str(tiny_config), "--name", "tight", "--json")
    # At 64 sequences a rank the activations of the wide MLP need more than the limit, at 32 half of it.
    command += ["--set", "training.batch_size=128", "--set", "training.micro_batch_size=64"]
    command += [
        "--set",
        "training.max_steps=1",
        "--set",
        "model.mlp_width=16384",
        "--set",
        "evaluation.sample_tokens=0",
    ]
    outcome = subprocess.run(
        ["prlimit", f"--data={limit}", *command], cwd=CHECKOUT, capture_output=True, text=True, timeout=240, check=False
    )
    assert outcome.returncode == 0, outcome.stderr
    run = RunFolder(tmp_path / "runs" / "tight")
    tries = [event for event in run.read_events() if event.kind == "out_of_memory"]
    assert tries
    plan = json.loads(run.plan.read_text())
    assert plan["micro_batch"] < 64
    assert plan["micro_batch"] * plan["accumulation"] * 2 == 128
    assert json.loads(outcome.stdout)["tokens"] == 128 * 32


def test_listing_the_tasks_is_fast() -> None:
    def once() -> float:
        began = time.perf_counter()
        subprocess.run(fab_command("--list"), cwd=CHECKOUT, check=True, capture_output=True, env=os.environ)
        return time.perf_counter() - began

    assert min(once() for _ in range(5)) < 0.6
