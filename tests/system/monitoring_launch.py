"""`fab train` with ranks that are monitoring_worker: python -m tests.system.monitoring_launch CONFIG NAME [K=V].

With --resume in place of CONFIG: `fab train --resume`, of the run in the folder NAME.
"""

from __future__ import annotations

import sys
from typing import Any

from launch.backends import local
from launch.errors import LoopworksError
from launch.train import TrainRequest, train

torchrun_command = local.torchrun_command


def command(*arguments: Any) -> tuple[str, ...]:
    return (*torchrun_command(*arguments)[:-1], "tests.system.monitoring_worker")


if __name__ == "__main__":
    local.torchrun_command = command
    config, name, *overrides = sys.argv[1:]
    try:
        if config == "--resume":
            train(TrainRequest(None, tuple(overrides), resume=name, console=False))
        else:
            train(TrainRequest(config, tuple(overrides), name, console=False))
    except LoopworksError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
