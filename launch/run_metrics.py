"""Runs for Prometheus, as their folders and processes show them: that also tells of a run whose exporter is gone."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import get_args

from launch.monitor_files import cluster_of
from launch.runs import LIVE, list_runs, observed_state
from launch.supervision import read_nodes, read_watch
from training.heartbeat import read_heartbeats
from training.records import Phase, RunFolder, RunState

# Of ended runs only the latest are told: their number must not grow without bound.
SHOWN_RUNS, SHOWN_AGE_S = 20, 24 * 3600.0
# A rank says nothing while it saves or evaluates.
AWAY_SILENCE_S = 600.0


def run_samples(folders: Iterable[tuple[RunFolder, RunState]], now: float) -> Iterator[str]:
    """Yields the lines that tell Prometheus of each run as its folder and processes show it.

    Those that go on, and of the others the newest ended within a day. Of two runs of one name and cluster, in two
    folders, the first is told.
    """
    yield "# TYPE loopworks_run_phase gauge"
    yield "# TYPE loopworks_run_updated_timestamp_seconds gauge"
    yield "# TYPE loopworks_run_node_report_timestamp_seconds gauge"
    yield "# TYPE loopworks_run_heartbeat_timestamp_seconds gauge"
    ended, told = 0, set[str]()
    for folder, state in folders:
        live = state.phase in LIVE
        labels = f'cluster="{cluster_of(folder)}",run="{folder.name}"'
        if labels in told or (not live and (ended >= SHOWN_RUNS or now - state.updated > SHOWN_AGE_S)):
            continue
        ended += not live
        told.add(labels)
        for phase in get_args(Phase):
            yield f'loopworks_run_phase{{{labels},phase="{phase}"}} {int(state.phase == phase)}'
        yield f"loopworks_run_updated_timestamp_seconds{{{labels}}} {state.updated}"
        if live:
            yield from _node_samples(folder, labels)


def _node_samples(folder: RunFolder, labels: str) -> Iterator[str]:
    """Yields when each node of a run last reported, and the oldest heartbeat of its ranks.

    A run on nodes tells them in nodes/NODE.json, those of its present attempt; another one has its ranks' heartbeats in
    its folder, and is on one machine.
    """
    watch = read_watch(folder)
    if watch is None:
        beats = [(beat.phase, beat.time) for beat in read_heartbeats(folder.path / "heartbeats")]
        yield from _oldest_beat(beats, labels, _served_by(folder) or socket.gethostname())
        return
    for name, node in read_nodes(folder, watch.attempt).items():
        if node.phase == "ended":
            continue  # says nothing any more, and need not
        yield f'loopworks_run_node_report_timestamp_seconds{{{labels},node="{name}"}} {node.time}'
        yield from _oldest_beat([(beat["phase"], beat["time"]) for beat in node.ranks], labels, name)


def _oldest_beat(beats: Iterable[tuple[str, float]], labels: str, node: str) -> Iterator[str]:
    times = [at for phase, at in beats if phase != "ended"]
    if times:
        yield f'loopworks_run_heartbeat_timestamp_seconds{{{labels},node="{node}"}} {min(times)}'


def seen_state(folder: RunFolder) -> RunState:
    """Returns the state of a run as it is now, also of one that another machine of the shared storage works on alone.

    That one has no process here. It says itself where it is served; while its ranks give signs of life, it is what its
    folder says.
    """
    state = observed_state(folder)
    written = folder.read_state()
    if state.phase in LIVE or written.phase not in LIVE or _served_by(folder) in ("", socket.gethostname()):
        return state
    beats = [beat.time for beat in read_heartbeats(folder.path / "heartbeats")]
    return written if time.time() - max(beats, default=0.0) < AWAY_SILENCE_S else state


def _served_by(folder: RunFolder) -> str:
    """Returns the machine of which a run's entry for Prometheus speaks; empty where there is none."""
    entry = folder.path.parent / ".targets" / f"{folder.name}.json"
    try:
        return str(json.loads(entry.read_text(encoding="utf-8"))[0]["labels"]["node"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""  # no entry, or one of another shape: nobody has said so


def control_page(runs_dirs: Sequence[Path]) -> bytes:
    """Returns the metrics of the control side; the disk is that of the first folder."""
    folders = [(folder, seen_state(folder)) for directory in runs_dirs for folder in list_runs(directory)]
    lines = list(run_samples(folders, time.time()))
    if runs_dirs and runs_dirs[0].is_dir():
        disk = shutil.disk_usage(runs_dirs[0])
        lines += [f"loopworks_runs_disk_free_bytes {disk.free}", f"loopworks_runs_disk_size_bytes {disk.total}"]
    return ("\n".join(lines) + "\n").encode()


def withdraw_dead_targets(runs_dirs: Iterable[Path]) -> list[str]:
    """Removes the entries of runs that are gone (a rank 0 that was killed could not do it). Returns their names."""
    gone = []
    for runs_dir in runs_dirs:
        for entry in sorted((runs_dir / ".targets").glob("*.json")):
            folder = RunFolder(runs_dir / entry.stem)
            if not folder.path.is_dir() or seen_state(folder).phase not in LIVE:
                entry.unlink(missing_ok=True)
                gone.append(entry.stem)
    return gone
