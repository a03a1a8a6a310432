"""Small checkpoints of plain files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from training.checkpoint import layout
from training.checkpoint.layout import Manifest

MakeCheckpoint = Callable[..., Path]

FILES = {
    "deepspeed/shard-0.pt": b"zero" * 300,
    "deepspeed/shard-1.pt": b"one!" * 300,
    "state.json": b"{}\n",
    "rng/rank-00000.pt": b"dice" * 10,
}


def fill_staged(staged: Path, step: int, files: dict[str, bytes] | None = None) -> Manifest:
    """Writes files into a staged folder and returns their manifest (not yet written)."""
    entries = {}
    for name, data in (files or FILES).items():
        path = staged / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data + str(step).encode())
        entries[name] = layout.hash_file(path)
    return Manifest(
        step=step,
        world_size=2,
        zero_stage=1,
        precision="fp32",
        epoch=0,
        sample=step * 8,
        config_sha256="c" * 64,
        tokenizer_sha256="t" * 64,
        created_unix_s=1000.0 + step,
        files=entries,
    )


@pytest.fixture(name="fill")
def _fill() -> Callable[..., Manifest]:
    return fill_staged


@pytest.fixture
def make_checkpoint() -> MakeCheckpoint:
    """Returns a function that commits a checkpoint of `step` below `root`."""

    def make(root: Path, step: int, **changes: object) -> Path:
        staged = layout.stage(root, step)
        manifest = fill_staged(staged, step)
        return layout.commit(staged, root, Manifest(**{**manifest.__dict__, **changes}))

    return make
