"""fab data.prepare, data.verify and data.inspect: builds the command of `python -m training.data` and runs it here.

The work itself is done by that program, in a process of its own that gets the terminal and its signals.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

from training.errors import EXIT_INTERRUPTED


def prepare(
    source: Sequence[str],
    out: str,
    *,
    demo: bool = False,
    format: str | None = None,  # noqa: A002 (the flag's name)
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    seq_len: int | None = None,
    workers: int | None = None,
    config: str | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """Makes a dataset in folder `out` from the sources; returns the exit code."""
    return run(
        prepare_command(
            source,
            out,
            demo=demo,
            format=format,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            seq_len=seq_len,
            workers=workers,
            config=config,
            overrides=overrides,
        )
    )


def verify(path: str, *, workers: int | None = None) -> int:
    """Checks every shard and record of a dataset; returns the exit code (1: something is wrong)."""
    return run(verify_command(path, workers=workers))


def inspect(path: str, *, index: int | None = None, split: str | None = None) -> int:
    """Shows statistics and decoded sequences of a dataset; returns the exit code."""
    return run(inspect_command(path, index=index, split=split))


def prepare_command(
    source: Sequence[str],
    out: str,
    *,
    demo: bool = False,
    format: str | None = None,  # noqa: A002 (the flag's name)
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    seq_len: int | None = None,
    workers: int | None = None,
    config: str | None = None,
    overrides: Sequence[str] = (),
) -> list[str]:
    """Returns the command that prepares a dataset; flags that are None keep the configuration's value."""
    flags = {
        "--format": format,
        "--tokenizer": tokenizer,
        "--vocab-size": vocab_size,
        "--seq-len": seq_len,
        "--workers": workers,
        "--config": config,
    }
    settings = [text for override in overrides for text in ("--set", override)]
    sources = [f"--source={name}" for name in source]
    return [*_program("prepare"), *(["--demo"] if demo else []), "--out", out, *_flags(flags), *settings, *sources]


def verify_command(path: str, *, workers: int | None = None) -> list[str]:
    """Returns the command that checks a dataset."""
    return [*_program("verify"), path, *_flags({"--workers": workers})]


def inspect_command(path: str, *, index: int | None = None, split: str | None = None) -> list[str]:
    """Returns the command that shows a dataset."""
    return [*_program("inspect"), path, *_flags({"--index": index, "--split": split})]


def run(command: Sequence[str]) -> int:
    """Runs a command in the foreground; returns its exit code.

    An interrupt from the keyboard reaches the program too: it is waited for, because it leaves its work in order.
    """
    with subprocess.Popen(command) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.wait()
            return EXIT_INTERRUPTED


def _program(name: str) -> list[str]:
    return [sys.executable, "-m", "training.data", name]


def _flags(values: Mapping[str, object]) -> list[str]:
    return [text for flag, value in values.items() if value is not None for text in (flag, str(value))]
