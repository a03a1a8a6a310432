"""One rank of a run: `python -m training`, started by the node agent with the run folder in LOOPWORKS_RUN."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import TextIO

from training.errors import EXIT_CONFIG, EXIT_FAILED
from training.faults import rank_error
from training.process import end_with_parent, redirect_output
from training.records import RankError, RunFolder


def main() -> int:
    """Runs this rank; returns its exit code."""
    path = os.environ.get("LOOPWORKS_RUN")
    if not path or not Path(path).is_dir():
        print("python -m training is started by `fab train`, with a run folder in LOOPWORKS_RUN", file=sys.stderr)
        return EXIT_CONFIG
    run, rank = RunFolder(path), int(os.environ.get("RANK", "0"))
    end_with_parent()
    terminal = redirect_output(run.rank_log(rank))
    try:
        from training.job import run_rank

        return run_rank(run, terminal)
    except Exception as error:  # noqa: BLE001 (the edge of the process: everything is recorded and ends it)
        traceback.print_exc()
        return report(run, rank_error(rank, error), terminal)


def report(run: RunFolder, record: RankError, terminal: TextIO) -> int:
    """Leaves the error in the run folder, or says it on the terminal when the folder cannot be written (disk full)."""
    try:
        run.write_error(record)
    except OSError as error:
        print(f"rank {record.rank}: {record.cause}; and this could not be recorded: {error}", file=terminal, flush=True)
    return record.exit_code or EXIT_FAILED


if __name__ == "__main__":
    # Not sys.exit: after an error other ranks may sit in a collective, and the teardown of its threads would wait for
    # them.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
