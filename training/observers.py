"""Callbacks of rank 0 that connect a run with monitoring: the exporter, its sampler, and requests from outside."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from training.callbacks import Callback, StepReport
from training.communication import CommunicationSampler
from training.config.schema import MonitoringSection
from training.metrics import Exporter
from training.records import RunFolder

log = logging.getLogger("training")


def observers(
    run: RunFolder, section: MonitoringSection, *, master: str, cuda: bool, request_save: Callable[[str], None]
) -> list[Callback]:
    """Returns the callbacks of rank 0 that `section` asks for; `master` is the node where the ranks meet."""
    requests = SaveRequests(run, request_save)
    if section.port is None:
        return [requests]
    if section.communication_sampling == 0:
        return [requests, Exporter(run, section, master=master)]
    sampler = CommunicationSampler(section.communication_sampling, cuda=cuda)
    return [requests, sampler, Exporter(run, section, master=master, communication_ratio=lambda: sampler.ratio)]


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
