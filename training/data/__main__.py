"""`python -m training.data prepare|verify|inspect`: the commands behind fab data.*, on the machine they run on.

They import no torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from training.config.load import parse_override
from training.config.prepare import DEMO_SETTINGS, PrepareSection
from training.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, ConfigError, LoopworksError, UsageError

_OPTIONS = ("format", "tokenizer", "vocab_size", "sequence_length", "workers")


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except LoopworksError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; run the command again to go on", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m training.data", description="Prepare, verify and show datasets.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    prepare = commands.add_parser("prepare", help="make a dataset from text")
    prepare.add_argument("--source", action="append", nargs="+", default=[], metavar="PATH", help="also s3://")
    prepare.add_argument("--demo", action="store_true", help="text that every Python installation carries")
    prepare.add_argument("--out", type=Path, required=True, metavar="DIR")
    prepare.add_argument("--format", metavar="tfrecord|hdf5")
    prepare.add_argument("--tokenizer", metavar="FILE|train")
    prepare.add_argument("--vocab-size", type=int, metavar="N")
    prepare.add_argument("--seq-len", type=int, dest="sequence_length", metavar="N")
    prepare.add_argument("--workers", type=int, metavar="N", help="0: one a CPU")
    prepare.add_argument("--config", type=Path, metavar="FILE", help="configuration with a prepare: section")
    prepare.add_argument("--set", action="append", default=[], metavar="prepare.KEY=VALUE")
    prepare.set_defaults(run=_prepare)
    verify = commands.add_parser("verify", help="check every shard and record against the manifest")
    verify.add_argument("dir", type=Path, metavar="DIR")
    verify.add_argument("--workers", type=int, default=0, metavar="N")
    verify.set_defaults(run=_verify)
    inspect = commands.add_parser("inspect", help="show statistics and decoded sequences")
    inspect.add_argument("dir", metavar="DIR")
    inspect.add_argument("--index", type=int, metavar="I")
    inspect.add_argument("--split", default="train")
    inspect.set_defaults(run=_inspect)
    return parser


def _prepare(options: argparse.Namespace) -> int:
    from training.data.prepare import prepare
    from training.data.report import print_report
    from training.data.sources import DEMO_SOURCE

    sources = [source for group in options.source for source in group]
    if options.demo == bool(sources):
        raise UsageError("name what to prepare", "give either --source PATH... or --demo")
    settings = _settings(options)
    result = prepare([DEMO_SOURCE] if options.demo else sources, options.out, settings)
    console = Console()
    if result.report is None:
        console.print(f"{options.out}: already prepared from this input with these settings", soft_wrap=True)
    else:
        print_report(result.report, options.out, console)
    return EXIT_OK


def _settings(options: argparse.Namespace) -> PrepareSection:
    """Demo settings or defaults, then the configuration file, then --set, then the flags."""
    data: dict[str, Any] = dict(DEMO_SETTINGS) if options.demo else {}
    if options.config is not None:
        data = _merged(data, _section_of(options.config))
    for text in options.set:
        key, value = parse_override(text)
        if key[0] != "prepare" or len(key) < 2:
            raise ConfigError([f"--set {text}: only keys of the prepare section can be set here"])
        for part in reversed(key[1:]):
            value = {part: value}
        data = _merged(data, value)
    data |= {name: getattr(options, name) for name in _OPTIONS if getattr(options, name) is not None}
    try:
        return PrepareSection.model_validate(data)
    except ValidationError as error:
        raise ConfigError([f"prepare.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]) from None


def _section_of(path: Path) -> dict[str, Any]:
    """The keys that the file's prepare: section gives. The whole file is checked."""
    from training.config import load_config

    section = getattr(load_config(path), "prepare", None)
    return section.model_dump(exclude_unset=True) if isinstance(section, PrepareSection) else {}


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    merged = dict(old)
    for key, value in new.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def _verify(options: argparse.Namespace) -> int:
    from training.data.progress import human_bytes
    from training.data.verify import verify_dataset

    result = verify_dataset(options.dir, options.workers)
    for fault in result.faults:
        print(fault)
    counted = f"{result.shards:,} shards, {result.sequences:,} sequences, {human_bytes(result.bytes)}"
    print(
        f"{options.dir}: {counted}: "
        + (f"{len(result.faults)} faults" if result.faults else "all as the manifest says")
    )
    return EXIT_FAILED if result.faults else EXIT_OK


def _inspect(options: argparse.Namespace) -> int:
    from training.data.inspection import print_dataset

    print_dataset(options.dir, Console(), options.index, options.split)
    return EXIT_OK


if __name__ == "__main__":
    code = main()
    if code == EXIT_INTERRUPTED:
        # A normal exit would wait until the workers have finished their parts; they end when this process does.
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
