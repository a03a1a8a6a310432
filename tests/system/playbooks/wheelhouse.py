"""Wheels of all that a node's Python needs, for the hosts' own Python (Debian's). Kept between test runs."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import time
from pathlib import Path

from tests.system.hosts.tree import cache_directory

CHECKOUT = Path(__file__).resolve().parents[3]
# The project, with what the head needs beyond it.
WANTED = ".[nodes]"
UNUSED_AFTER_S = 7 * 86400


def wheels() -> Path:
    """Returns the folder, filling it when it is not there."""
    names = ("pyproject.toml", "constraints/common.txt", "constraints/cpu.txt")
    content = b"\n".join([WANTED.encode(), *((CHECKOUT / name).read_bytes() for name in names)])
    folder = cache_directory().parent / f"wheelhouse-{hashlib.sha256(content).hexdigest()[:12]}"
    if not folder.is_dir():
        fresh = folder.with_name(f"wheelhouse.fresh-{os.getpid()}")
        for old in cache_directory().parent.glob("wheelhouse*"):
            if time.time() - old.stat().st_mtime > UNUSED_AFTER_S:  # another run may be using it
                shutil.rmtree(old, ignore_errors=True)
        subprocess.run(["/usr/bin/python3", "-m", "venv", fresh / "venv"], check=True, capture_output=True, timeout=120)
        wheel = [fresh / "venv/bin/pip", "wheel", "-q", "-c", "constraints/cpu.txt", "-w", fresh, WANTED]
        subprocess.run(wheel, cwd=CHECKOUT, check=True, capture_output=True, timeout=900)
        shutil.rmtree(fresh / "venv")
        fresh.rename(folder)
    return folder
