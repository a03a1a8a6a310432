"""A rank's whole job: join, build, train, evaluate, save, report."""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlparse

from rich.console import Console

from training.callbacks import Callback, ConsoleProgress, FolderLog
from training.checkpoint.manager import CheckpointManager
from training.checkpoint.ranks import GlooRanks
from training.checkpoint.saver import Identity
from training.closing import closing_report, show_report
from training.config import RunConfig, load_config
from training.config.schema import DataSection
from training.data.files import sha256_of
from training.data.mixture import open_data
from training.distributed import RankInfo, join, leave
from training.drain import drain_mark
from training.eager import without_compiler
from training.engine import Engine, EngineSettings
from training.errors import EXIT_OK, ConfigError
from training.evaluation import Evaluator
from training.heartbeat import Pulse
from training.observers import observers
from training.preemption import DrainWatcher, MetadataWatcher, StopFlag, exit_code, on_ec2, signals_request_stop
from training.process import log_to
from training.records import RunFolder
from training.safety import Progress, Safety
from training.saving import save_model
from training.trainer import Trainer

# How long the end of a run waits for its uploads; what is left then goes on with the next start.
STOP_UPLOAD_S, END_UPLOAD_S = 30.0, 3600.0


@dataclass(frozen=True)
class Job:
    """What the control side decided: configuration and plan, read from the run folder."""

    config: RunConfig
    plan: dict[str, Any]
    dataset_dir: Path

    @property
    def data(self) -> DataSection:
        """The data section, with the folder that the control side found (the demo's lies in the checkout)."""
        section = self.config.data
        if section.mixture is not None or section.path.startswith("s3://"):
            return section
        return section.model_copy(update={"path": str(self.dataset_dir)})

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
    flag = StopFlag()
    pulse = Pulse(run, int(os.environ["RANK"]), flag)
    distributed = job.config.distributed
    _host_own_store(distributed.init_method)
    rank = join(job.plan["backend"], distributed.init_method, job.plan["device"], distributed.timeout_s)
    code = _train(job, run, rank, terminal, pulse, flag)
    # Only after success: with a rank gone, leaving would wait for it.
    leave()
    pulse.ended(code)
    return code


def _host_own_store(init_method: str) -> None:
    """With tcp://host:port rank 0 has to listen there; torchrun tells its ranks that it does, which is true of its own
    port only."""
    if init_method.startswith("tcp://") and str(urlparse(init_method).port) != os.environ.get("MASTER_PORT"):
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"


def _train(job: Job, run: RunFolder, rank: RankInfo, terminal: TextIO, pulse: Pulse, flag: StopFlag) -> int:
    began = time.time()
    train_set, held_out = open_data(job.data, "train"), open_data(job.data, "validation")
    _check_vocabulary(job, train_set.manifest.vocab_size)
    _check_prompt(job, train_set.tokenizer_file)
    if not job.settings.compile:
        without_compiler()
    engine = Engine(job.config, job.settings, rank)
    evaluator = Evaluator(job.config, engine, held_out, rank)
    safety = Safety(_checkpoints(job, run, engine, train_set.tokenizer_file), flag, job.config.checkpoint)
    trainer = Trainer(
        job.config,
        rank,
        engine,
        train_set,
        run,
        total_steps=job.plan["total_steps"],
        evaluator=evaluator,
        safety=safety,
        flag=flag,
        callbacks=[pulse, *_callbacks(run, rank, terminal), *_observers(job.config, run, rank, flag)],
        peak_flop_per_s=job.plan["peak_flop_per_s"],
    )
    if job.plan["resume"]:
        trainer.progress = safety.resume() or trainer.progress
    safety.manager.start_uploads()
    with signals_request_stop(flag), _drain_watcher(rank, flag), _metadata_watcher(job.config, rank, flag):
        _announce_start(run, job, rank, trainer.progress.step)
        progress = trainer.fit()
        left_early = progress.step < trainer.total_steps
        safety.manager.close(STOP_UPLOAD_S if left_early else END_UPLOAD_S)
        save_model(engine, train_set.tokenizer_file, run, progress)
        if left_early:
            return _stopped(run, rank, progress, flag)
        report = closing_report(job.config, train_set, evaluator, engine, run, progress, seconds=time.time() - began)
        if rank.is_first:
            _conclude(run, progress, report, terminal)
    return EXIT_OK


def _checkpoints(job: Job, run: RunFolder, engine: Engine, tokenizer: Path) -> CheckpointManager:
    identity = Identity(
        config_sha256=hashlib.sha256(run.config.read_bytes()).hexdigest(),
        tokenizer_sha256=sha256_of(tokenizer),
    )
    return CheckpointManager(
        engine.deepspeed,
        run.checkpoints,
        job.config.checkpoint,
        run.name,
        identity,
        GlooRanks(),
        run.event,
    )


def _drain_watcher(rank: RankInfo, flag: StopFlag) -> AbstractContextManager[object]:
    """One watcher a node for the mark that says that it is to be left."""
    return nullcontext() if rank.local_rank else closing(DrainWatcher(flag, drain_mark()))


def _metadata_watcher(config: RunConfig, rank: RankInfo, flag: StopFlag) -> AbstractContextManager[object]:
    """One watcher a node for notices of the cloud that it takes the node away."""
    wanted = config.checkpoint.watch_spot
    if rank.local_rank != 0 or wanted is False or (wanted == "auto" and not on_ec2()):
        return nullcontext()
    return closing(MetadataWatcher(flag, config.checkpoint.metadata_url))


def _announce_start(run: RunFolder, job: Job, rank: RankInfo, step: int) -> None:
    if rank.is_first:
        settings = job.settings
        run.event("start", step, f"{rank.world_size} ranks, ZeRO stage {settings.zero_stage}, {settings.precision}")


def _stopped(run: RunFolder, rank: RankInfo, progress: Progress, flag: StopFlag) -> int:
    """Records that the run left before its end and returns the exit code for it."""
    if rank.is_first:
        reason = flag.reason or "asked on another rank"
        run.update_state(phase="stopped", step=progress.step, message=f"stopped at step {progress.step}: {reason}")
        run.event("stopped", progress.step, f"saved and left: {reason}")
    return exit_code()


def _conclude(run: RunFolder, progress: Progress, report: dict[str, Any], terminal: TextIO) -> None:
    run.write_result(report)
    run.update_state(phase="finished", step=progress.step)
    run.event("end", progress.step, "finished")
    show_report(report, _consoles(run, terminal))


def _check_vocabulary(job: Job, vocab_size: int) -> None:
    if vocab_size > job.config.model.vocab_size:
        raise ConfigError(
            [
                f"model.vocab_size: {job.config.model.vocab_size} is smaller than the dataset's {vocab_size}; "
                "raise it to that number or to a multiple of 64 above it"
            ]
        )


def _check_prompt(job: Job, tokenizer: Path) -> None:
    """A prompt that does not fit would be found only when the run is over."""
    if not job.config.evaluation.sample_tokens:
        return
    from tokenizers import Tokenizer

    tokens = len(Tokenizer.from_file(str(tokenizer)).encode(job.config.evaluation.prompt).ids)
    if not 0 < tokens < job.config.model.context_length:
        raise ConfigError(
            [
                f"evaluation.prompt: it has {tokens} tokens; 1 to {job.config.model.context_length - 1} fit into "
                "model.context_length with room for an answer (evaluation.sample_tokens: 0 writes no sample)"
            ]
        )


def _callbacks(run: RunFolder, rank: RankInfo, terminal: TextIO) -> list[Callback]:
    if not rank.is_first:
        return []
    log_to(run.log)
    return [FolderLog(run), ConsoleProgress(Console(file=terminal))] if _wants_console() else [FolderLog(run)]


def _observers(config: RunConfig, run: RunFolder, rank: RankInfo, flag: StopFlag) -> list[Callback]:
    return observers(
        run,
        config.monitoring,
        rank=rank.rank,
        local_rank=rank.local_rank,
        master=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        cuda=rank.device.type == "cuda",
        request_save=flag.request_save,
    )


def _consoles(run: RunFolder, terminal: TextIO) -> list[Console]:
    consoles = [Console(file=run.log.open("a", encoding="utf-8"), width=100)]
    return [*consoles, Console(file=terminal)] if _wants_console() else consoles


def _wants_console() -> bool:
    return os.environ.get("LOOPWORKS_CONSOLE") == "1"
