"""One rank of a small run that saves every few steps; started, killed and resumed by test_checkpoint_ranks.py.

Arguments: folder of the run, last step, ZeRO stage, seconds a step lasts at least. Each step appends its loss to
losses.txt (rank 0), as hexadecimal so that nothing is rounded.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from training.checkpoint.manager import CheckpointManager
from training.checkpoint.ranks import GlooRanks
from training.checkpoint.saver import Identity
from training.checkpoint.state import SavedProgress
from training.config import ModelSection
from training.config.schema import CheckpointSection
from training.eager import without_compiler
from training.model.init import init_weights
from training.model.recurrent import RecurrentLM
from training.preemption import StopFlag, exit_code, signals_request_stop

BATCH = 6
MODEL = ModelSection(
    preset=None,
    vocab_size=61,
    context_length=16,
    width=32,
    heads=2,
    mlp_width=48,
    prelude_layers=1,
    core_layers=1,
    coda_layers=1,
    mean_recurrence=3,
    backprop_depth=2,
)


def make_engine(stage: int):
    """A DeepSpeed engine of the small model; weights without decay are a group of their own."""
    without_compiler()
    model = RecurrentLM(MODEL)
    init_weights(model, MODEL, 0)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=3e-3),
        config={
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(),
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
            "steps_per_print": None,
        },
    )
    return engine


def train_step(engine, sample: int) -> float:
    """One step on the sequences from `sample` on; returns the mean loss over all ranks."""
    share = BATCH // dist.get_world_size()
    first = sample + dist.get_rank() * share
    rows = [torch.randint(0, 61, (9,), generator=torch.Generator().manual_seed(i)) for i in range(first, first + share)]
    tokens = torch.stack(rows)
    loss = engine(tokens[:, :-1], tokens[:, 1:], steps=(1, 2), state_scale=0.0).loss
    engine.backward(loss)
    engine.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def any_rank(flag: bool) -> bool:
    """The vote at the end of a step."""
    vote = torch.tensor(float(flag))
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    return bool(vote)


def main() -> int:
    """Resumes, trains, saves; ends early, after a save, when any rank was asked to."""
    folder, last, stage, pause_s = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    first, flag = dist.get_rank() == 0, StopFlag()

    def tell(kind: str, step: int, text: str, **numbers: float) -> None:
        with (folder / "events.txt").open("a") as file:
            file.write(f"{kind} {step} {text}\n")

    engine = make_engine(stage)
    section = CheckpointSection.model_validate({"interval_steps": 3})
    manager = CheckpointManager(engine, folder / "checkpoints", section, "run", Identity("c", "t"), GlooRanks(), tell)
    with signals_request_stop(flag):
        resumed = manager.resume()
        step = resumed.progress.step if resumed else 0
        stop = False
        while step < last and not stop:
            loss = train_step(engine, step * BATCH)
            step += 1
            if first:
                with (folder / "losses.txt").open("a") as file:
                    file.write(f"{step} {loss.hex()}\n")
            stop = any_rank(flag.stop)
            if manager.due(step) or stop or step == last:
                manager.save(SavedProgress(step, 0, step * BATCH), wait=stop or step == last)
            manager.poll()
            time.sleep(pause_s)
        manager.close()
        dist.barrier()
    dist.destroy_process_group()
    return exit_code() if stop else 0


if __name__ == "__main__":
    sys.exit(main())
