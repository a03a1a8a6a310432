"""Callbacks that connect a run with monitoring: exporter, sampler, the pace of a node, requests from outside."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from training.callbacks import Callback, StepReport
from training.communication import CommunicationSampler
from training.config.schema import MonitoringSection
from training.metrics import Exporter, Shares
from training.records import RunFolder

log = logging.getLogger("training")


def observers(
    run: RunFolder,
    section: MonitoringSection,
    *,
    rank: int,
    local_rank: int,
    master: str,
    cuda: bool,
    request_save: Callable[[str], None],
) -> list[Callback]:
    """Returns the callbacks of this rank that `section` asks for; `master` is the node where the ranks meet.

    Rank 0 serves the run's metrics and takes requests; the first rank of each node notes the node's own pace; every
    rank maps its GPU to the run where `monitoring.job_mapping_dir` is a folder.
    """
    serves = rank == 0 and section.port is not None
    paced = local_rank == 0 and section.textfile_dir is not None
    found: list[Callback] = [SaveRequests(run, request_save)] if rank == 0 else []
    shares: Shares = lambda: None  # noqa: E731 (one of two sources, chosen below)
    if section.communication_sampling > 0 and (serves or paced):
        sampler = CommunicationSampler(section.communication_sampling, cuda=cuda)
        found.append(sampler)
        shares = lambda: sampler.shares  # noqa: E731
    if serves:
        found.append(Exporter(run, section, master=master, shares=shares))
    if paced and section.textfile_dir is not None:
        found.append(PaceFile(Path(section.textfile_dir), run.name, shares))
    if section.job_mapping_dir is not None and Path(section.job_mapping_dir).is_dir():
        found.append(JobMapping(Path(section.job_mapping_dir), gpu_index(local_rank, os.environ), run.name))
    return found


class PaceFile:
    """Callback of the first rank of a node: writes the part of a step that is the node's own, without waiting.

    In a synchronous step all nodes take equally long; a slow one is known by waiting less than the rest. For
    node_exporter's textfile collector: written whole, removed at the end.
    """

    def __init__(self, directory: Path, run: str, shares: Shares) -> None:
        self._path, self._run, self._shares = directory / f"loopworks_pace_{run}.prom", run, shares
        self._works = True

    def on_start(self, step: int, total_steps: int) -> None:
        """Nothing to do."""

    def on_step(self, report: StepReport) -> None:
        """Writes at each log interval, once the share of communication is known."""
        shares = self._shares()
        if report.metrics is None or shares is None or not self._works:
            return
        busy_s = report.metrics.step_s * (1.0 - sum(shares.values()))
        text = f'# TYPE loopworks_node_busy_seconds gauge\nloopworks_node_busy_seconds{{run="{self._run}"}} {busy_s}\n'
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self._path)
        except OSError as error:
            self._works = False
            log.warning("the node's pace is not told: cannot write %s: %s", self._path, error.strerror or error)

    def on_message(self, text: str) -> None:
        """Nothing to do."""

    def on_end(self) -> None:
        """Takes the file away: a node without a run has no pace."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot remove %s: %s", self._path, error.strerror or error)


def gpu_index(local_rank: int, environment: Mapping[str, str]) -> str | None:
    """Returns the number of this rank's GPU as dcgm-exporter counts; None where it has a name that is no number."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if not visible:
        return str(local_rank)
    names = [name.strip() for name in visible.split(",")]
    return names[local_rank] if local_rank < len(names) and names[local_rank].isdigit() else None


class JobMapping:
    """Callback of every rank: tells dcgm-exporter (--hpc-job-mapping-dir) which run this rank's GPU works for.

    One file a GPU, named by its number, with the run's name. It replaces what a killed run left behind, and goes when
    the run ends, unless another run has taken the GPU by then.
    """

    def __init__(self, directory: Path, gpu: str | None, run: str) -> None:
        self._path, self._run = None if gpu is None else directory / gpu, run

    def on_start(self, step: int, total_steps: int) -> None:
        """Writes the file, whole."""
        if self._path is None:
            log.warning("GPU metrics do not name this run: CUDA_VISIBLE_DEVICES has no numbers")
            return
        # Names that are no number are passed over by dcgm-exporter.
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            temporary.write_text(f"{self._run}\n", encoding="utf-8")
            temporary.replace(self._path)
        except OSError as error:
            log.warning("GPU metrics do not name this run: cannot write %s: %s", self._path, error.strerror or error)

    def on_step(self, report: StepReport) -> None:
        """Nothing to do."""

    def on_message(self, text: str) -> None:
        """Nothing to do."""

    def on_end(self) -> None:
        """Takes the file away if it is still this run's."""
        if self._path is None:
            return
        try:
            if self._path.read_text(encoding="utf-8") == f"{self._run}\n":
                self._path.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("cannot remove %s: %s", self._path, error.strerror or error)


class SaveRequests:
    """Callback of rank 0: passes on a request for a checkpoint that somebody has left in the run folder."""

    def __init__(self, run: RunFolder, request_save: Callable[[str], None]) -> None:
        self._file, self._request_save = save_request_file(run), request_save

    def on_start(self, step: int, total_steps: int) -> None:
        """Nothing to do."""

    def on_step(self, report: StepReport) -> None:
        """Looks whether there is a request: one system call a step."""
        if not self._file.exists():
            return
        try:
            reason = self._file.read_text(encoding="utf-8").strip()
            self._file.unlink()
        except OSError as error:
            log.warning("a request for a checkpoint cannot be read: %s", error)
            return
        self._request_save(reason or "asked for a checkpoint")

    def on_message(self, text: str) -> None:
        """Nothing to do."""

    def on_end(self) -> None:
        """Nothing to do."""


def save_request_file(run: RunFolder) -> Path:
    """Returns the file whose presence asks the run for a checkpoint; its text is the reason."""
    return run.path / "save.request"
