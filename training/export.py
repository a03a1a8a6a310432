"""Writes the weights of a run for other programs.

python -m training.export --run runs/NAME --format hf --to FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from training.config import load_config
from training.errors import EXIT_OK
from training.faults import as_loopworks_error
from training.records import RunFolder

DTYPES = ("float32", "bfloat16", "float16")


def export_run(run: RunFolder, form: str, target: Path, dtype: str) -> Path:
    """Exports the newest checkpoint of a run that verifies, and returns the new folder. Raises LoopworksError."""
    import torch

    from training.checkpoint.export import export, newest_weights
    from training.saving import tokenizer_of

    _, weights = newest_weights(run.checkpoints)
    model = load_config(run.config).model
    return export(
        weights,
        model,
        target,
        form="hf" if form == "hf" else "safetensors",
        dtype=getattr(torch, dtype),
        tokenizer=tokenizer_of(run),
    )


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m training.export", description="Export the weights of a run.")
    parser.add_argument("--run", required=True, help="run folder")
    parser.add_argument("--format", choices=("safetensors", "hf"), default="safetensors")
    parser.add_argument("--to", required=True, help="new folder")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        folder = export_run(RunFolder(options.run), options.format, Path(options.to), options.dtype)
    except Exception as error:  # foreseen ones get one line, defects their traceback
        known = as_loopworks_error(error)
        if known is None:
            raise
        print(f"error: {known}", file=sys.stderr)
        return known.exit_code
    print(json.dumps({"folder": str(folder)}) if options.json else f"exported to {folder}")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
