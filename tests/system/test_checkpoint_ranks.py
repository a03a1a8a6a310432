"""Real ranks under DeepSpeed: killed at random moments, resumed on other numbers of ranks, asked to leave."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from training.checkpoint import catalog

pytestmark = pytest.mark.system
CHECKOUT = Path(__file__).parents[2]
STEPS = 14


class Ranks:
    """The processes of a run."""

    def __init__(self, folder: Path, world: int, stage: int, last: int = STEPS, pause_s: float = 0.0) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.world = folder, world
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        script = Path(__file__).with_name("checkpoint_ranks_worker.py")
        self.logs = [(folder / f"rank-{rank}.log") for rank in range(world)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            env = {
                **{name: value for name, value in os.environ.items() if name != "KUBERNETES_SERVICE_HOST"},
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "PYTHONPATH": str(CHECKOUT),
                "DS_ACCELERATOR": "cpu",
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            }
            command = [sys.executable, str(script), str(folder), str(last), str(stage), str(pause_s)]
            with log.open("ab") as file:
                self.processes.append(subprocess.Popen(command, env=env, stdout=file, stderr=file))

    def end(self, expected: int = 0) -> None:
        """Waits for all ranks and checks their exit codes."""
        try:
            codes = [process.wait(120) for process in self.processes]
        finally:
            self.kill()
        assert codes == [expected] * self.world, self.errors()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def errors(self) -> str:
        return "\n".join(log.read_text(errors="replace")[-1500:] for log in self.logs)


def _losses(folder: Path) -> dict[int, float]:
    """The loss of each step; a step trained again counts as it was the last time."""
    lines = (folder / "losses.txt").read_text().split("\n")
    return {int(step): float.fromhex(loss) for step, loss in (line.split() for line in lines if line)}


def _events(folder: Path) -> str:
    return (folder / "events.txt").read_text()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    Ranks(folder, 2, 1).end()
    return _losses(folder)


def _wait_for_step(run: Ranks, step: int) -> None:
    deadline = time.monotonic() + 90
    path = run.folder / "losses.txt"
    while not path.exists() or max(_losses(run.folder), default=0) < step:
        assert time.monotonic() < deadline and all(p.poll() is None for p in run.processes), run.errors()
        time.sleep(0.01)


def test_killed_ranks_resume_bit_identically_then_one_rank_then_three(undisturbed, tmp_path):
    draw = random.Random()
    run = Ranks(tmp_path, 2, 1, pause_s=0.05)
    _wait_for_step(run, 4)
    time.sleep(draw.uniform(0.0, 0.4))
    run.processes[draw.randrange(2)].send_signal(signal.SIGKILL)
    run.kill()  # as the node agent ends the others
    newest = catalog.newest_valid(tmp_path / "checkpoints")
    assert not newest.passed_over
    # An interval is three steps; the save at its end may still have been in flight.
    assert max(_losses(tmp_path)) - newest.manifest.step <= 5

    Ranks(tmp_path, 2, 1, last=10).end()
    assert f"resume {newest.manifest.step} " in _events(tmp_path)
    assert _losses(tmp_path) == {step: undisturbed[step] for step in range(1, 11)}, "not bit-identical"

    Ranks(tmp_path, 1, 1, last=12).end()
    Ranks(tmp_path, 3, 1, last=STEPS).end()
    assert "converted from 2 ranks" in _events(tmp_path)
    assert "converted from 1 ranks" in _events(tmp_path)
    losses = _losses(tmp_path)
    assert losses.keys() == undisturbed.keys()
    assert max(abs(losses[step] - undisturbed[step]) for step in undisturbed) < 1e-3


def test_zero_3_to_one_rank_of_stage_0_to_three_ranks_of_stage_3(undisturbed, tmp_path):
    Ranks(tmp_path, 2, 3, last=6).end()
    Ranks(tmp_path, 1, 0, last=9).end()
    Ranks(tmp_path, 3, 3, last=STEPS).end()
    assert "converted from 2 ranks, ZeRO stage 3" in _events(tmp_path)
    assert "converted from 1 ranks, ZeRO stage 0" in _events(tmp_path)
    losses = _losses(tmp_path)
    assert max(abs(losses[step] - undisturbed[step]) for step in undisturbed) < 1e-3


def test_a_signal_to_one_rank_makes_all_save_and_leave(tmp_path):
    run = Ranks(tmp_path, 2, 1, last=10_000, pause_s=0.01)
    _wait_for_step(run, 2)
    run.processes[1].send_signal(signal.SIGUSR1)
    run.processes[0].send_signal(signal.SIGTERM)
    run.processes[1].send_signal(signal.SIGTERM)  # further ones break nothing
    run.end(expected=75)
    saved = catalog.newest_valid(tmp_path / "checkpoints")
    assert not saved.passed_over
    assert saved.manifest.step == max(_losses(tmp_path))
