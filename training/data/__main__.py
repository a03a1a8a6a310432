"""`python -m training.data prepare ...`: the commands behind fab data.prepare, on the machine they run on. No torch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from training.config.prepare import PrepareSection, demo_settings
from training.errors import EXIT_INTERRUPTED, LoopworksError, UsageError

_OPTIONS = {
    "format": str,
    "tokenizer": str,
    "vocab_size": int,
    "sequence_length": int,
    "workers": int,
}


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
    commands = parser.add_subparsers(required=True)
    prepare = commands.add_parser("prepare", help="make a dataset from text")
    prepare.add_argument("--source", action="append", nargs="+", default=[], metavar="PATH")
    prepare.add_argument("--demo", action="store_true", help="text that every Python installation carries")
    prepare.add_argument("--out", type=Path, required=True, metavar="DIR")
    prepare.add_argument("--format")
    prepare.add_argument("--tokenizer", metavar="FILE|train")
    prepare.add_argument("--vocab-size", type=int)
    prepare.add_argument("--seq-len", type=int, dest="sequence_length")
    prepare.add_argument("--workers", type=int)
    prepare.set_defaults(run=_prepare)
    return parser


def _prepare(options: argparse.Namespace) -> int:
    from training.data.prepare import prepare
    from training.data.report import print_report
    from training.data.sources import DEMO_SOURCE

    sources = [source for group in options.source for source in group]
    if options.demo == bool(sources):
        raise UsageError("name what to prepare", "give either --source PATH... or --demo")
    given: dict[str, Any] = {key: getattr(options, key) for key in _OPTIONS if getattr(options, key) is not None}
    settings = demo_settings(**given) if options.demo else PrepareSection.model_validate(given)
    result = prepare([DEMO_SOURCE] if options.demo else sources, options.out, settings)
    console = Console()
    if result.report is None:
        console.print(f"{options.out}: already prepared from this input with these settings")
    else:
        print_report(result.report, options.out, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
