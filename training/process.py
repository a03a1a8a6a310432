"""What a rank does with its own process: where its output goes, and when it has to end."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TextIO

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Asks the kernel for SIGTERM when the node agent dies, so that no rank outlives it (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def redirect_output(log: Path) -> TextIO:
    """Sends this process's output, that of its libraries included, to `log`; returns the stream it had before.

    Tracebacks of crashes in native code go to the log too.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # A stream of its own that survives the redirection below and outlives this function.
    before = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8", errors="replace")
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    faulthandler.enable(sys.stderr)
    return before


def log_to(path: Path) -> None:
    """Sends the records of the `training` loggers to a file, with time."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("training")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
