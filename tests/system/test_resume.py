"""`fab train --resume`: after a crash, a signal and a change of ranks the run goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.processes import processes_of
from tests.system.conftest import CHECKOUT, Fab, fab_command
from training.records import RunFolder

pytestmark = pytest.mark.system

STEPS = 120
RUN = (
    *(
        "--set",
        f"training.max_steps={STEPS}",
        "--set",
        "training.batch_size=12",
        "--set",
        "training.lr_schedule=constant",
    ),
    *("--set", "checkpoint.interval_steps=10", "--set", "evaluation.sample_tokens=0"),
)


def losses(run: RunFolder) -> dict[int, float | None]:
    """Loss by step; of a step that was trained twice, the last time."""
    return {record.step: record.loss for record in run.read_metrics()}


def train_until(config: Path, run: RunFolder, step: int, end: Callable[[subprocess.Popen[str]], None]) -> int:
    """Starts a run, calls `end` once it has done `step` steps and has a checkpoint, and returns fab's exit code."""
    process = subprocess.Popen(
        fab_command("train", "--config", str(config), "--name", run.name, *RUN),
        cwd=CHECKOUT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    deadline = time.monotonic() + 90
    try:
        while len(run.read_metrics()) < step or not list(run.checkpoints.glob("step-*/COMMIT")):
            assert process.poll() is None, "the run ended before it could be disturbed"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        end(process)
        return process.wait(timeout=90)
    finally:
        for left in processes_of(str(run.path)):
            left.kill()
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_dataset: Path) -> dict[int, float | None]:
    from tests.system.conftest import TINY

    folder = tmp_path_factory.mktemp("undisturbed")
    config = folder / "tiny.yaml"
    config.write_text(TINY.format(data=tiny_dataset, runs=folder / "runs"))
    command = fab_command("train", "--config", str(config), "--name", "whole", *RUN)
    subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True, timeout=120)
    return losses(RunFolder(folder / "runs" / "whole"))


def test_after_kill_the_losses_are_bit_identical(
    fab: Fab, tiny_config: Path, tmp_path: Path, undisturbed: dict[int, float | None]
) -> None:
    run = RunFolder(tmp_path / "runs" / "killed")

    def kill_everything(process: subprocess.Popen[str]) -> None:
        for rank in processes_of(str(run.path)):
            rank.kill()

    assert train_until(tiny_config, run, 35, kill_everything) == 1
    reached = max(losses(run))
    outcome = fab("train", "--resume", "killed", "--json", "--set", f"run.dir={run.path.parent}")
    assert outcome.returncode == 0, outcome.stderr
    assert losses(run) == undisturbed
    (start,) = [event.step for event in run.read_events() if event.kind == "resume"]
    assert reached < STEPS, "the kill came too late to show anything"
    # One interval of 10, and the save that was in flight.
    assert reached - start <= 21
    assert json.loads(outcome.stdout)["steps"] == STEPS


def test_signal_to_one_rank_saves_all_and_leaves_with_75(
    fab: Fab, tiny_config: Path, tmp_path: Path, undisturbed: dict[int, float | None]
) -> None:
    run = RunFolder(tmp_path / "runs" / "told")

    def tell_one_rank(process: subprocess.Popen[str]) -> None:
        (rank,) = [p for p in processes_of(str(run.path)) if p.environ().get("RANK") == "1"]
        os.kill(rank.pid, signal.SIGUSR1)
        os.kill(rank.pid, signal.SIGTERM)  # a second one breaks nothing

    assert train_until(tiny_config, run, 35, tell_one_rank) == 75
    reached = max(losses(run))
    assert reached < STEPS
    assert fab("train", "--resume", "--json", "--set", f"run.dir={run.path.parent}").returncode == 0
    assert [event.step for event in run.read_events() if event.kind == "resume"] == [reached]
    assert losses(run) == undisturbed


def test_other_ranks_and_stages_go_on_within_a_thousandth(
    fab: Fab, tiny_config: Path, tmp_path: Path, undisturbed: dict[int, float | None]
) -> None:
    run = RunFolder(tmp_path / "runs" / "moved")

    def interrupt(process: subprocess.Popen[str]) -> None:
        process.send_signal(signal.SIGINT)

    assert train_until(tiny_config, run, 35, interrupt) == 130
    place = ("--set", f"run.dir={run.path.parent}")
    # On to one rank for some steps, then to three with ZeRO-3.
    middle = max(losses(run)) + 20
    one = fab(
        "train",
        "--resume",
        "moved",
        *place,
        "--set",
        "distributed.ranks_per_node=1",
        "--set",
        f"training.max_steps={middle}",
    )
    assert one.returncode == 0, one.stderr
    three = ("--set", "distributed.ranks_per_node=3", "--set", "distributed.zero_stage=3")
    last = fab("train", "--resume", "moved", *place, *three, "--set", f"training.max_steps={STEPS}")
    assert last.returncode == 0, last.stderr
    found = losses(run)
    assert sorted(found) == list(range(1, STEPS + 1))
    resumed = [event for event in run.read_events() if event.kind == "resume"]
    assert all("converted from" in event.message for event in resumed)
    for step, loss in undisturbed.items():
        assert loss is not None
        assert found[step] == pytest.approx(loss, rel=1e-3), f"step {step}"


def test_damaged_checkpoint_is_passed_over(fab: Fab, tiny_config: Path, tmp_path: Path) -> None:
    place = ("--set", f"run.dir={tmp_path / 'runs'}")
    shorter = ("--set", "training.max_steps=30")
    assert fab("train", "--config", str(tiny_config), "--name", "bad", *RUN, *shorter).returncode == 0
    run = RunFolder(tmp_path / "runs" / "bad")
    newest = sorted(run.checkpoints.glob("step-*"))[-1]
    victim = next(newest.glob("deepspeed/*model_states.pt"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    listed = fab("checkpoints", "--run", "bad", "--dir", str(run.path.parent), "--verify")
    assert listed.returncode == 1
    assert victim.name in listed.stdout
    outcome = fab("train", "--resume", "bad", *place, "--set", "training.max_steps=40")
    assert outcome.returncode == 0, outcome.stderr
    (resumed,) = [event for event in run.read_events() if event.kind == "resume"]
    assert resumed.step == 20
    assert newest.name in resumed.message
    assert victim.name in resumed.message


def test_run_that_is_still_running_is_not_resumed_beside_itself(fab: Fab, tiny_config: Path, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "live")
    answers = []

    def resume_beside(process: subprocess.Popen[str]) -> None:
        answers.append(fab("train", "--resume", "live", "--set", f"run.dir={run.path.parent}"))
        process.send_signal(signal.SIGINT)

    train_until(tiny_config, run, 1, resume_beside)
    assert answers[0].returncode == 2
    assert "is still running" in answers[0].stderr
