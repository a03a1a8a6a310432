"""A rank's whole job: join, build, train, evaluate, save, report."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from training.callbacks import Callback, ConsoleProgress, FolderLog
from training.closing import closing_report, show_report
from training.config import RunConfig, load_config
from training.data.dataset import open_dataset
from training.distributed import RankInfo, join, leave
from training.engine import Engine, EngineSettings
from training.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError
from training.evaluation import Evaluator
from training.process import log_to, on_stop_signal
from training.records import RunFolder
from training.saving import save_model
from training.trainer import Trainer

log = logging.getLogger("training")


@dataclass(frozen=True)
class Job:
    """What the control side decided: configuration and plan, read from the run folder."""

    config: RunConfig
    plan: dict[str, Any]
    dataset_dir: Path

    @property
    def settings(self) -> EngineSettings:
        """The part of the plan that the engine needs."""
        plan = self.plan
        return EngineSettings(
            plan["precision"], plan["zero_stage"], plan["micro_batch"], plan["accumulation"], plan["compile"]
        )


def read_job(run: RunFolder) -> Job:
    """Reads config.resolved.yaml and plan.json of a run folder."""
    plan = json.loads(run.plan.read_text(encoding="utf-8"))
    return Job(load_config(run.config), plan, Path(plan["dataset_dir"]))


def run_rank(run: RunFolder, terminal: TextIO) -> int:
    """Does the job of this rank and returns its exit code. Raises LoopworksError."""
    job = read_job(run)
    distributed = job.config.distributed
    rank = join(job.plan["backend"], distributed.init_method, job.plan["device"], distributed.timeout_s)
    code = _train(job, run, rank, terminal)
    # Only after success: with a rank gone, leaving would wait for it.
    leave()
    return code


def _train(job: Job, run: RunFolder, rank: RankInfo, terminal: TextIO) -> int:
    began = time.time()
    train_set, held_out = open_dataset(job.dataset_dir, "train"), open_dataset(job.dataset_dir, "validation")
    _check_vocabulary(job, train_set.manifest.vocab_size)
    engine = Engine(job.config, job.settings, rank)
    evaluator = Evaluator(job.config, engine, held_out, rank)
    trainer = Trainer(
        job.config,
        rank,
        engine,
        train_set,
        run,
        total_steps=job.plan["total_steps"],
        evaluator=evaluator,
        callbacks=_callbacks(run, rank, terminal),
        peak_flop_per_s=job.plan["peak_flop_per_s"],
    )
    on_stop_signal(lambda: setattr(trainer, "stop_requested", True))
    if rank.is_first:
        run.event(
            "start", 0, f"{rank.world_size} ranks, ZeRO stage {job.settings.zero_stage}, {job.settings.precision}"
        )
    progress = trainer.fit()
    finished = progress.step >= trainer.total_steps
    save_model(engine, job, run, progress)
    if not finished:
        if rank.is_first:
            run.update_state(phase="stopped", step=progress.step, message="asked to stop; the model is saved")
            run.event("stopped", progress.step, "asked to stop; the model is saved")
        return EXIT_INTERRUPTED
    report = closing_report(job.config, train_set, evaluator, engine, run, progress, seconds=time.time() - began)
    if rank.is_first:
        run.write_result(report)
        run.update_state(phase="finished", step=progress.step)
        run.event("end", progress.step, "finished")
        show_report(report, _consoles(run, terminal))
    return EXIT_OK


def _check_vocabulary(job: Job, vocab_size: int) -> None:
    if vocab_size > job.config.model.vocab_size:
        raise ConfigError(
            [
                f"model.vocab_size: {job.config.model.vocab_size} is smaller than the dataset's {vocab_size}; "
                "raise it to that number or to a multiple of 64 above it"
            ]
        )


def _callbacks(run: RunFolder, rank: RankInfo, terminal: TextIO) -> list[Callback]:
    if not rank.is_first:
        return []
    log_to(run.log)
    return [FolderLog(run), ConsoleProgress(Console(file=terminal))] if _wants_console() else [FolderLog(run)]


def _consoles(run: RunFolder, terminal: TextIO) -> list[Console]:
    consoles = [Console(file=run.log.open("a", encoding="utf-8"), width=100)]
    return [*consoles, Console(file=terminal)] if _wants_console() else consoles


def _wants_console() -> bool:
    return os.environ.get("LOOPWORKS_CONSOLE") == "1"
