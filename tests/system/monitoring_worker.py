"""One rank of a run with the observers of monitoring, and with a fault where MONITORING_FAULT names one.

slow_data  rank 0 waits for each batch            spike     the learning rate is far too high for a while
slow_rank  rank 1 is late at each step            collapse  weights with which all tokens have one state
two_nodes  each rank is a node of its own
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

import training.__main__ as entry
import training.engine as engine_module
import training.trainer as trainer_module
from training import job
from training.metrics import Exporter
from training.observers import SaveRequests, observers

FAULTS = os.environ.get("MONITORING_FAULT", "").split(",")
RANK = int(os.environ["RANK"])
SPIKE_AT, SPIKE_STEPS = 110, 80
spiked: list[int] = []


class ObservedTrainer(trainer_module.Trainer):
    """The trainer of the job, with the observers if the job has not added them itself."""

    def __init__(self, config: Any, rank: Any, engine: Any, dataset: Any, run: Any, **rest: Any) -> None:
        callbacks = list(rest.pop("callbacks", ()))
        section = config.monitoring
        if "two_nodes" in FAULTS and RANK == 1:
            section = section.model_copy(update={"textfile_dir": f"{section.textfile_dir}-1"})
        if not any(isinstance(callback, SaveRequests | Exporter) for callback in callbacks):
            callbacks += observers(
                run,
                section,
                rank=rank.rank,
                local_rank=0 if "two_nodes" in FAULTS else rank.local_rank,
                master=os.environ.get("MASTER_ADDR", "127.0.0.1"),
                cuda=False,
                request_save=rest["flag"].request_save,
            )
        super().__init__(config, rank, engine, dataset, run, callbacks=callbacks, **rest)

    def _micro_steps(self, *arguments: Any) -> Any:
        if "slow_rank" in FAULTS and RANK == 1:
            time.sleep(0.5)
        return super()._micro_steps(*arguments)


def slow_loader(*arguments: Any, **options: Any) -> Iterator[Any]:
    for batch in make_loader(*arguments, **options):
        if "slow_data" in FAULTS and RANK == 0:
            time.sleep(0.05)
        yield batch


def spiking_rate(step: int, *arguments: Any) -> float:
    """Only the first time that the run gets there: the bad steps are left out after a rollback."""
    wanted = lr_at(step, *arguments)
    if "spike" in FAULTS and step >= SPIKE_AT and len(spiked) < SPIKE_STEPS:
        spiked.append(step)
        return wanted * 1e5
    return wanted


def collapsed(model: Any, config: Any, seed: int) -> None:
    """All tokens have one embedding, and the core does not see its own state: what comes out is one state."""
    init_weights(model, config, seed)
    if "collapse" in FAULTS:
        weights = dict(model.named_parameters())
        with torch.no_grad():
            embedding = weights["transformer.wte.weight"]
            embedding.copy_(embedding[0].expand_as(embedding))
            weights["transformer.adapter.weight"][:, : config.width] = 0


make_loader, lr_at = trainer_module.make_loader, trainer_module.lr_at
trainer_module.lr_at = spiking_rate
init_weights = engine_module.init_weights
engine_module.init_weights = collapsed
trainer_module.make_loader = slow_loader
job.Trainer = ObservedTrainer

if __name__ == "__main__":
    code = entry.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
