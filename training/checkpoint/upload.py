"""Uploads beside training: finds on disk what is not in the store yet, and never gives up.

What is pending is read from the disk each time, so nothing is forgotten by a crash or while the store is away.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from training.checkpoint import catalog, layout
from training.checkpoint.errors import CheckpointError, RemoteError
from training.checkpoint.upload_progress import is_uploaded
from training.errors import LoopworksError

# Told what happened: kind ("checkpoint_uploaded", "checkpoint_upload_delayed" ...), step, one line of text.


class OnEvent(Protocol):
    """Is told what happened: kind, step, a line for people, and numbers for programs."""

    def __call__(self, kind: str, step: int, message: str, **details: Any) -> None:
        """Called from the thread in which it happened."""


FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 300.0


class Store(Protocol):
    """What the uploader needs of an object store."""

    def upload(self, folder: Path) -> None:
        """Uploads a committed checkpoint, going on where an earlier attempt stopped."""


def pending(root: Path) -> list[Path]:
    """Returns the committed checkpoints that are not known to be in the store, newest first."""
    folders = [root / layout.step_name(e.step) for e in catalog.scan(root) if e.manifest is not None]
    return [folder for folder in reversed(folders) if not is_uploaded(folder)]


def next_wait_s(failures: int, first_s: float = FIRST_WAIT_S, longest_s: float = LONGEST_WAIT_S) -> float:
    """Returns the seconds to wait after so many failures in a row: doubled each time, up to a limit."""
    return float(min(longest_s, first_s * 2 ** min(failures - 1, 30)))


class Uploader:
    """One thread that uploads what is pending, the newest first.

    `after_upload` runs in it after each one (retention).
    """

    def __init__(
        self,
        store: Store,
        root: Path,
        on_event: OnEvent,
        *,
        after_upload: Callable[[], None] = lambda: None,
        first_wait_s: float = FIRST_WAIT_S,
    ) -> None:
        self._store, self._root, self._on_event, self._after_upload = store, root, on_event, after_upload
        self._first_wait_s = first_wait_s
        self._wake, self._idle = threading.Event(), threading.Event()
        self._noticing = threading.Lock()
        self._stop = False
        self._uploading: int | None = None
        self._failures = 0
        self._last_problem = ""
        self._passed_over: set[str] = set()
        self._wake.set()  # what an earlier process left
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
        self._thread.start()

    def notice(self) -> None:
        """Says that there is a new checkpoint."""
        with self._noticing:
            self._idle.clear()
            self._wake.set()

    def is_uploading(self, step: int) -> bool:
        """Whether this step is on its way now (retention leaves it alone)."""
        return self._uploading == step

    def drain(self, timeout_s: float) -> bool:
        """Waits until nothing is pending; False when the time is over first."""
        return self._idle.wait(timeout_s)

    def close(self, timeout_s: float = 5.0) -> list[Path]:
        """Ends the thread and returns what is still pending (found again by the next process)."""
        self._stop = True
        self._wake.set()
        self._thread.join(timeout_s)
        return pending(self._root)

    def _run(self) -> None:
        while not self._stop:
            self._wake.wait(next_wait_s(self._failures, self._first_wait_s) if self._failures else None)
            self._wake.clear()
            if self._stop:
                return
            while (folder := self._next()) is not None and self._upload(folder):
                pass
            if self._next() is None:
                self._say_idle()

    def _say_idle(self) -> None:
        """Unless a checkpoint has come since the look at the disk: the next round finds it."""
        with self._noticing:
            if not self._wake.is_set():
                self._idle.set()

    def _next(self) -> Path | None:
        """The newest checkpoint to upload; looked up anew each time, so a new one goes before the old."""
        return None if self._stop else next((f for f in pending(self._root) if f.name not in self._passed_over), None)

    def _upload(self, folder: Path) -> bool:
        """Uploads one; False when the store should be left alone for a while."""
        step = layout.parse_step(folder.name) or 0
        started = time.monotonic()
        self._uploading = step
        try:
            self._store.upload(folder)
            self._after_upload()
        except (FileNotFoundError, CheckpointError) as error:
            self._passed_over.add(folder.name)
            if folder.exists():  # else retention has removed it meanwhile
                self._on_event("checkpoint_upload_skipped", step, f"{folder.name} is damaged: {error}")
            return True
        except Exception as error:  # noqa: BLE001 (the thread must outlive whatever an attempt meets)
            self._failed(step, error)
            return False
        finally:
            self._uploading = None
        late = f", after {self._failures} attempts" if self._failures else ""
        self._failures, self._last_problem = 0, ""
        self._on_event(
            "checkpoint_uploaded", step, f"{folder.name} is in the store ({time.monotonic() - started:.1f} s{late})"
        )
        return True

    def _failed(self, step: int, error: Exception) -> None:
        self._failures += 1
        # Credentials and buckets are put right by people: no need to ask every second.
        if isinstance(error, RemoteError):
            self._failures = max(self._failures, 6)
        problem = str(error) if isinstance(error, LoopworksError) else f"{type(error).__name__}: {error}"
        if problem != self._last_problem:  # one warning an outage, not one an attempt
            self._last_problem = problem
            self._on_event("checkpoint_upload_delayed", step, problem)
