"""What each rank says of itself, so that a hang can be told from work: phase, step and time, in a small file.

    heartbeats/rank-N.json   Heartbeat, replaced as a whole; in the run folder, or where LOOPWORKS_HEARTBEATS points
                             (the node agent takes a folder on the node's own disk: a hanging file system is no excuse)

SIGUSR2 makes a rank write the stacks of all its threads to its log. Imports no torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from typing import Literal

from training.records import Record, RunFolder

HEARTBEATS_VARIABLE = "LOOPWORKS_HEARTBEATS"
RankPhase = Literal["starting", "training", "closing", "ended"]
# Steps can be far shorter; a file a step would be noise.
INTERVAL_S = 0.5


class Heartbeat(Record):
    """One rank's sign of life."""

    rank: int
    pid: int
    phase: RankPhase
    step: int
    time: float
    step_s: float = 0.0


class Pulse:
    """Callback of every rank: writes its heartbeat as the run goes. A sign of life that cannot be written is left out:
    on a full disk the run itself says so."""

    def __init__(self, run: RunFolder, rank: int) -> None:
        folder = Path(os.environ.get(HEARTBEATS_VARIABLE) or run.path / "heartbeats")
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"rank-{rank}.json"
        self._beat = Heartbeat(rank=rank, pid=os.getpid(), phase="starting", step=0, time=time.time())
        self._last_step = (time.monotonic(), 0)
        if hasattr(signal, "SIGUSR2"):
            faulthandler.register(signal.SIGUSR2, file=sys.stderr, all_threads=True)
        self.beat("starting", 0)

    def beat(self, phase: RankPhase, step: int) -> None:
        """Writes the heartbeat."""
        self._beat = self._beat.model_copy(update={"phase": phase, "step": step, "time": time.time()})
        temporary = self._path.with_suffix(".new")
        with contextlib.suppress(OSError):
            temporary.write_text(self._beat.model_dump_json(), encoding="utf-8")
            temporary.replace(self._path)

    def on_start(self, step: int, total_steps: int) -> None:
        """The first step may compile and reads its first data: it is still part of the start."""
        self._last_step = (time.monotonic(), step)
        self.beat("starting", step)

    def on_step(self, report: object) -> None:
        """Notes the step, at most each INTERVAL_S."""
        step, now = int(getattr(report, "step", 0)), time.monotonic()
        began, before = self._last_step
        if self._beat.phase == "starting" or now - began >= INTERVAL_S:
            self._beat = self._beat.model_copy(update={"step_s": (now - began) / max(1, step - before)})
            self._last_step = (now, step)
            self.beat("training", step)

    def on_message(self, text: str) -> None:
        """An evaluation or a warning is a sign of life too."""
        self.beat(self._beat.phase, self._beat.step)

    def on_end(self) -> None:
        """The steps are done; saving and the closing evaluation follow."""
        self.beat("closing", self._beat.step)

    def ended(self) -> None:
        """The rank leaves as it should: that its process is gone is then no fault."""
        self.beat("ended", self._beat.step)


def read_heartbeats(folder: Path) -> list[Heartbeat]:
    """Returns the heartbeats in a folder, by rank; one that is just being replaced is left out."""
    found = []
    for path in folder.glob("rank-*.json"):
        with contextlib.suppress(OSError, ValueError):
            found.append(Heartbeat.model_validate_json(path.read_text(encoding="utf-8")))
    return sorted(found, key=lambda beat: beat.rank)
