"""Resumes a run from the newest checkpoint that can be trusted, converted where ranks, stage or precision differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from training.checkpoint import catalog, engine_io, layout, universal
from training.checkpoint.catalog import Choice, Remote
from training.checkpoint.errors import CheckpointError
from training.checkpoint.layout import Manifest
from training.checkpoint.ranks import Ranks
from training.checkpoint.saver import Identity
from training.checkpoint.state import SavedProgress, read_progress, restore_rng_state, rng_name
from training.errors import LoopworksError

T = TypeVar("T")


@dataclass(frozen=True)
class Resumed:
    """From where a run goes on."""

    folder: Path
    manifest: Manifest
    progress: SavedProgress
    converted: bool
    passed_over: tuple[str, ...]


def find(root: Path, ranks: Ranks, remote: Remote | None = None, *, at_most_step: int | None = None) -> Choice:
    """Returns the checkpoint to resume from, the same on all ranks; rank 0 looks, mends and verifies.

    Raises LoopworksError on all ranks when it fails on rank 0.
    """
    return _on_first(
        ranks,
        lambda: (layout.recover(root), catalog.newest_valid(root, remote, at_most_step=at_most_step))[1],
    )


def load(engine: Any, choice: Choice, ranks: Ranks, identity: Identity | None = None) -> Resumed:
    """Loads the chosen checkpoint into a DeepSpeed engine; a collective.

    `identity` refuses a checkpoint of another tokenizer. Same ranks, stage and precision: everything is bit-
    identical to the moment of the save, random state included. Otherwise the state is converted first, and random
    state is not restored (what a run draws follows from seed and step, so it goes on the same).
    """
    folder, manifest = choice.folder, choice.manifest
    if folder is None or manifest is None:
        raise CheckpointError(_nothing_found(choice), "start anew (without --resume) or restore a checkpoint")
    check_identity(manifest, identity)
    progress, more = read_progress(folder)
    convert = universal.needs_conversion(
        manifest, ranks.world_size, engine_io.zero_stage(engine), engine_io.precision(engine)
    )
    try:
        if convert:
            converted = _on_first(ranks, lambda: universal.convert(folder, more.get("parameter_names", [])))
            universal.load_universal(engine, converted)
        else:
            engine_io.load(engine, folder)
            restore_rng_state(folder / rng_name(ranks.rank))
    except (RuntimeError, KeyError, AssertionError, ValueError) as error:
        raise CheckpointError(
            f"{folder.name} does not fit this model: {type(error).__name__}: {str(error).splitlines()[0]}",
            "compare model and training settings with the config.resolved.yaml of the run that saved it",
        ) from error
    return Resumed(folder, manifest, progress, convert, tuple(str(passed) for passed in choice.passed_over))


def check_identity(manifest: Manifest, identity: Identity | None) -> None:
    """Raises CheckpointError when the checkpoint was trained with another tokenizer: its tokens mean something else."""
    if identity is not None and manifest.tokenizer_sha256 != identity.tokenizer_sha256:
        raise CheckpointError(
            f"{layout.step_name(manifest.step)} was trained with another tokenizer "
            f"({manifest.tokenizer_sha256[:12]}, this run has {identity.tokenizer_sha256[:12]})",
            "use the dataset that the run was started with",
        )


def _nothing_found(choice: Choice) -> str:
    if not choice.passed_over:
        return "there is no checkpoint to resume from"
    return "no checkpoint can be trusted: " + "; ".join(str(passed) for passed in choice.passed_over)


def _on_first(ranks: Ranks, act: Callable[[], T]) -> T:
    """Returns on all ranks what `act` returns on rank 0, or raises its LoopworksError on all."""
    outcome: T | LoopworksError | None = None
    if ranks.rank == 0:
        try:
            outcome = act()
        except LoopworksError as error:
            outcome = error
        except OSError as error:
            outcome = CheckpointError(f"cannot read the checkpoints: {error}", "check the folder of the run")
    answer = ranks.gather(outcome)[0]
    if isinstance(answer, LoopworksError):
        raise answer
    result: T = answer
    return result
