"""Started by test_checkpoint_kill.py: saves and uploads without end in a process that is killed, again and again.

For each line on stdin it forks such a process and kills it after so many seconds. Imports happen once, so that a
hundred kills take seconds.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from training.checkpoint import catalog, layout
from training.checkpoint.remote import S3Settings, S3Store
from training.checkpoint.upload import Uploader


def content(step: int, name: str) -> bytes:
    """What file `name` of `step` holds: anyone can compute it, so a mix-up of steps would be noticed."""
    return random.Random(f"{step}/{name}").randbytes(300_000 if name.startswith("big") else 2_000)


NAMES = ("deepspeed/big-0.pt", "deepspeed/big-1.pt", "state.json", "rng/rank-00000.pt")


def save(root: Path, step: int) -> None:
    """One save of plain files by the protocol of the saver."""
    staged, entries = layout.stage(root, step), {}
    for name in NAMES:
        path = staged / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(content(step, name))
            file.flush()
            os.fsync(file.fileno())
        entries[name] = layout.hash_file(path)
    manifest = layout.Manifest(step, 2, 1, "fp32", 0, step * 8, "c", "t", time.time(), files=entries)
    layout.commit(staged, root, manifest)


def run(root: Path, store: S3Store, log: Path) -> None:
    """Resumes as a run does, then saves and uploads until it is killed."""
    layout.recover(root)
    choice = catalog.newest_valid(root)
    step = choice.manifest.step if choice.manifest is not None else 0
    uploader = Uploader(store, root, lambda *event: None, first_wait_s=0.01)
    while True:
        step += 10
        save(root, step)
        with log.open("a") as file:
            file.write(f"{step}\n")
        uploader.notice()
        catalog.prune(root, keep_last=3, spare=uploader.is_uploading)


def main() -> None:
    """root, endpoint and log file are arguments; each input line is a number of seconds."""
    root, endpoint, log = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    # Parts far below the real minimum, so that small files exercise multipart uploads. A client without a
    # connection can be used after a fork, and making one takes longer than most of the processes live.
    store = S3Store(S3Settings("s3://ckpts/kill", endpoint, concurrency=2, part_bytes=65536))
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(root, store, log)
        time.sleep(float(line))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print("killed", flush=True)


if __name__ == "__main__":
    main()
