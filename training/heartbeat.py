"""What each rank says of itself, so that a hang can be told from work: phase, step and time, in a small file.

    heartbeats/rank-N.json   Heartbeat, padded to a fixed size; in the run folder, or where LOOPWORKS_HEARTBEATS points
                             (the node agent takes a folder on the node's own disk: a hanging file system is no excuse)

A heartbeat is written over the one before, in place: that needs no space, so a disk that fills up during the run does
not make it look dead. SIGUSR2 makes a rank write the stacks of all its threads to its log. Imports no torch.
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

from pydantic import Field

from training.preemption import StopFlag
from training.records import Record, RunFolder

HEARTBEATS_VARIABLE = "LOOPWORKS_HEARTBEATS"
RankPhase = Literal["starting", "training", "closing", "ended"]
# Steps can be far shorter; a file a step would be noise.
INTERVAL_S = 0.5
SIZE_BYTES = 2048
MOST_REASON = 300


class Heartbeat(Record):
    """One rank's sign of life."""

    rank: int
    pid: int
    phase: RankPhase
    step: int
    time: float
    step_s: float = 0.0
    leaving: str = Field("", description="Why the rank's node is to be left (drained, taken away); empty otherwise.")
    code: int | None = Field(None, description="What the rank ends with, once it has ended as it should.")


class Pulse:
    """Callback of every rank: writes its heartbeat as the run goes. A sign of life that cannot be written is left out:
    a full disk of the node must not end the run. `flag` tells when the node is to be left."""

    def __init__(self, run: RunFolder, rank: int, flag: StopFlag | None = None) -> None:
        self._flag = flag or StopFlag()
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
        changes = {"phase": phase, "step": step, "time": time.time(), "leaving": self._flag.leaving[:MOST_REASON]}
        self._beat = self._beat.model_copy(update=changes)
        with contextlib.suppress(OSError):
            _overwrite(self._path, self._beat.model_dump_json())

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

    def ended(self, code: int) -> None:
        """The rank leaves as it should, with `code`: that its process is gone is then no fault."""
        self._beat = self._beat.model_copy(update={"code": code})
        self.beat("ended", self._beat.step)


def _overwrite(path: Path, text: str) -> None:
    """Writes `text`, padded to SIZE_BYTES, over what the file holds. The file exists only once it is whole."""
    data = text.encode().ljust(SIZE_BYTES)
    try:
        target = os.open(path, os.O_WRONLY)
    except FileNotFoundError:
        temporary = path.with_suffix(".new")
        temporary.write_bytes(data)
        temporary.replace(path)
        return
    try:
        os.pwrite(target, data, 0)
    finally:
        os.close(target)


def read_heartbeats(folder: Path) -> list[Heartbeat]:
    """Returns the heartbeats in a folder, by rank; one that is just being written is left out."""
    found = []
    for path in folder.glob("rank-*.json"):
        with contextlib.suppress(OSError, ValueError):
            found.append(Heartbeat.model_validate_json(path.read_text(encoding="utf-8")))
    return sorted(found, key=lambda beat: beat.rank)
