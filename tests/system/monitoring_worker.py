"""One rank of a run with the observers of monitoring, and with a fault where MONITORING_FAULT names one.

slow_data: rank 0 waits for each batch        slow_rank: rank 1 is late at each step
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import training.__main__ as entry
import training.trainer as trainer_module
from training import job
from training.metrics import Exporter
from training.observers import SaveRequests, observers

FAULTS = os.environ.get("MONITORING_FAULT", "").split(",")
RANK = int(os.environ["RANK"])


class ObservedTrainer(trainer_module.Trainer):
    """The trainer of the job, with the observers if the job has not added them itself."""

    def __init__(self, config: Any, rank: Any, engine: Any, dataset: Any, run: Any, **rest: Any) -> None:
        callbacks = list(rest.pop("callbacks", ()))
        if not any(isinstance(callback, SaveRequests | Exporter) for callback in callbacks):
            callbacks += observers(
                run,
                config.monitoring,
                rank=rank.rank,
                local_rank=rank.local_rank,
                master=os.environ.get("MASTER_ADDR", "127.0.0.1"),
                cuda=False,
                request_save=rest["flag"].request_save,
            )
        super().__init__(config, rank, engine, dataset, run, callbacks=callbacks, **rest)

    def train_step(self, *arguments: Any) -> Any:
        if "slow_rank" in FAULTS and RANK == 1:
            time.sleep(0.2)
        return super().train_step(*arguments)


def slow_loader(*arguments: Any, **options: Any) -> Iterator[Any]:
    for batch in make_loader(*arguments, **options):
        if "slow_data" in FAULTS and RANK == 0:
            time.sleep(0.05)
        yield batch


make_loader = trainer_module.make_loader
trainer_module.make_loader = slow_loader
job.Trainer = ObservedTrainer

if __name__ == "__main__":
    code = entry.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
