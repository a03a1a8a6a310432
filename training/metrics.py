"""Metrics of a run for Prometheus: served over HTTP by rank 0, next to the step loop and never in its way.

The loop only leaves numbers behind (`on_step` stores a few of them); text is made when somebody asks, in another
thread. What the run folder says already (events, phase) is read from there at that moment, so its counts survive a
restart. A taken port or a full disk leaves a warning and no exporter; a client that hangs is dropped after a few
seconds; an error while answering is that answer's alone. Names, types and units: monitoring/series.yaml.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from training.callbacks import StepReport
from training.config.schema import MonitoringSection
from training.metrics_server import MetricsServer, open_server, own_address
from training.phases import PHASES
from training.records import EventRecord, MetricsRecord, Phase, RunFolder

log = logging.getLogger("training")

DEFAULT_PORT = 9401
QUEUE_RECORDS = 10_000
STEP_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0)
# Closed sets: a label may not grow with the run.
RESTART_REASONS = ("out_of_memory", "stopped", "interrupt", "failure")
STEP_PHASES = (*PHASES, "communication", "checkpoint", "evaluation", "other")
Shares = Callable[[], Mapping[str, float] | None]
"""Exposed communication as shares of a step, by the phase that it is in; None while it is not known."""


def productive_seconds(records: Iterable[MetricsRecord], first_step: int = 0) -> float:
    """Returns the seconds in steps whose results the run kept: steps done again (restart, rollback) count once."""
    spans: list[tuple[int, int, float]] = []
    for record in records:
        add_span(spans, record, spans[-1][1] if spans else first_step)
    return sum(seconds for _, _, seconds in spans)


def add_span(spans: list[tuple[int, int, float]], record: MetricsRecord, previous_step: int) -> None:
    """Adds (from step, to step, seconds) of a record; spans at or after its beginning are taken away."""
    while spans and spans[-1][1] >= record.step:
        _, stop, _ = spans.pop()
        previous_step = spans[-1][1] if spans else min(previous_step, stop - 1)
    begin = min(previous_step, record.step - 1)
    spans.append((begin, record.step, (record.step - begin) * record.step_s))


def restart_reasons(events: Iterable[EventRecord]) -> Counter[str]:
    """Counts starts after the first, by what ended the attempt before."""
    counts: Counter[str] = Counter()
    ended_by, starts = "failure", 0
    for event in events:
        if event.kind == "start":
            starts += 1
            if starts > 1:
                counts[ended_by] += 1
            ended_by = "failure"
        elif event.kind in RESTART_REASONS:
            ended_by = event.kind
    return counts


def phase_seconds(
    record: MetricsRecord,
    steps: int,
    elapsed_s: float,
    exposed: Mapping[str, float],
    events: Sequence[EventRecord],
) -> dict[str, float]:
    """Splits the `elapsed_s` seconds up to a record over STEP_PHASES.

    What lies between steps is told by the events; exposed communication is taken away from the phase it is in.
    """
    stepping = record.step_s * steps
    parts = {
        "data": record.data_wait_s * steps,
        "forward": (record.forward_s or 0.0) * steps,
        "backward": (record.backward_s or 0.0) * steps,
        "optimizer": (record.optimizer_s or 0.0) * steps,
    }
    # Clocks of two kinds: the parts must not be more than the whole.
    known = max(sum(parts.values()), stepping)
    parts = {phase: seconds * stepping / known if known else 0.0 for phase, seconds in parts.items()}
    parts["other"] = max(0.0, stepping - sum(parts.values()))
    waits = {phase: min(parts.get(phase, 0.0), share * stepping) for phase, share in exposed.items() if phase != "data"}
    parts = {phase: seconds - waits.get(phase, 0.0) for phase, seconds in parts.items()}
    between = max(0.0, elapsed_s - stepping)
    stalls = sum(float(event.details.get("stall_s", 0.0)) for event in events if event.kind == "checkpoint")
    checkpoint = min(stalls, between)
    evaluated = any(event.kind == "evaluation" for event in events)
    rest = between - checkpoint
    return {
        **parts,
        "communication": sum(waits.values()),
        "checkpoint": checkpoint,
        "evaluation": rest if evaluated else 0.0,
        "other": parts["other"] + (0.0 if evaluated else rest),
    }


class EventTail:
    """Reads the events that were added to events.jsonl since the last look."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.events: list[EventRecord] = []

    def read(self) -> list[EventRecord]:
        """Returns all complete events so far; a line that is not an event is passed over."""
        if not self._path.exists():
            return self.events
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                try:
                    self.events.append(EventRecord.model_validate_json(line))
                except ValidationError:
                    log.warning("a line of %s is not an event", self._path.name)
        return self.events


class RunSeries:
    """The numbers of a run, and their form for Prometheus (a collector of prometheus_client)."""

    def __init__(self, run: RunFolder, shares: Shares = lambda: None) -> None:
        self._run, self._tail = run, EventTail(run.events)
        self._shares = shares
        self._queue: deque[tuple[MetricsRecord, int, Mapping[str, float]]] = deque(maxlen=QUEUE_RECORDS)
        self._spans: list[tuple[int, int, float]] = []
        self._last: MetricsRecord | None = None
        self._buckets = [0] * (len(STEP_BUCKETS_S) + 1)
        self._step_sum_s = 0.0
        self._phase_s = dict.fromkeys(STEP_PHASES, 0.0)
        self._tokens = 0.0
        self._steps = 0
        self._seen_s = time.time()
        self.heartbeat = time.time()
        self.step = 0
        self.total_steps = 0

    def begin(self, step: int, total_steps: int) -> None:
        """Takes over what the run had done before this start."""
        self.step, self.total_steps, self.heartbeat = step, total_steps, time.time()
        for record in self._run.read_metrics():
            add_span(self._spans, record, self._spans[-1][1] if self._spans else 0)
        self._seen_s = time.time()

    def add_step(self, seconds: float) -> None:
        """Counts a step. Only the loop's thread writes here: a scrape at this very moment is one step behind."""
        self._steps += 1
        self._step_sum_s += seconds
        self._buckets[bisect_left(STEP_BUCKETS_S, seconds)] += 1

    def add(self, record: MetricsRecord, steps: int) -> None:
        """Leaves a record that covers `steps` steps for the next scrape; takes no lock and reads no file."""
        self._queue.append((record, steps, self._shares() or {}))

    def _absorb(self, record: MetricsRecord, steps: int, exposed: Mapping[str, float]) -> None:
        self._last = record
        self._tokens += record.tokens_per_s * record.step_s * steps
        add_span(self._spans, record, self._spans[-1][1] if self._spans else record.step - steps)
        events = [event for event in self._tail.events if self._seen_s <= event.time <= record.time]
        elapsed = record.time - self._seen_s
        for phase, seconds in phase_seconds(record, steps, elapsed, exposed, events).items():
            self._phase_s[phase] += seconds
        self._seen_s = record.time

    def collect(self) -> Iterator[Any]:
        """Yields the metric families; called by one thread at a time, that which answers a scrape."""
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        self._tail.read()
        while self._queue:
            self._absorb(*self._queue.popleft())
        yield from self._gauges()
        steps = _cumulative(self._buckets)
        names = [str(bound) for bound in STEP_BUCKETS_S] + ["+Inf"]
        yield HistogramMetricFamily(
            "train_step_seconds",
            "Seconds of an optimizer step.",
            buckets=list(zip(names, steps, strict=True)),
            sum_value=self._step_sum_s,
        )
        yield CounterMetricFamily("train_steps_total", "Optimizer steps of this process.", value=self._steps)
        yield CounterMetricFamily("train_tokens_total", "Tokens of all ranks in this process.", value=self._tokens)
        phases = CounterMetricFamily("train_phase_seconds_total", "Where the wall time went.", labels=["phase"])
        for phase, seconds in self._phase_s.items():
            phases.add_metric([phase], seconds)
        yield phases
        yield from self._event_families()

    def _gauges(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        state, shares = self._run.read_state(), self._shares()
        phase = GaugeMetricFamily("train_phase", "1 for the phase that the run is in.", labels=["phase"])
        for name in get_args(Phase):
            phase.add_metric([name], float(name == state.phase))
        yield phase
        values: dict[str, tuple[str, float | None]] = {
            "train_heartbeat_timestamp_seconds": ("Unix time of the last step.", self.heartbeat),
            "train_step": ("Optimizer steps done in the run.", self.step),
            "train_planned_steps": ("Optimizer steps that the run will have.", self.total_steps),
            "train_productive_seconds": ("Seconds in kept steps.", sum(span[2] for span in self._spans)),
            "train_wall_seconds": ("Seconds since the run began.", max(0.0, time.time() - state.started)),
            "train_communication_ratio": (
                "Exposed communication, sampled.",
                None if shares is None else sum(shares.values()),
            ),
        }
        last = self._last
        if last is not None:
            values |= {
                "train_loss": ("Mean cross entropy in nats a token.", last.loss),
                "train_grad_norm": ("Gradient norm before clipping.", last.grad_norm),
                "train_learning_rate": ("Learning rate.", last.learning_rate),
                "train_recurrence_depth": ("Mean core iterations.", last.recurrence),
                "train_tokens_per_second": ("Tokens a second over all ranks.", last.tokens_per_s),
                "train_flop_per_second": ("Model FLOP a second over all ranks.", last.flop_per_s),
                "train_mfu_ratio": ("Model FLOP over the devices' peak.", last.mfu_ratio),
                "train_token_correlation_ratio": ("Mean correlation of token states.", last.token_correlation),
                "train_state_change_ratio": ("Relative change of the last iteration.", last.state_change_ratio),
            }
        for name, (text, value) in values.items():
            # Unknown or not finite: no sample. NaN would make every comparison false and hide the fault.
            if value is not None:
                yield GaugeMetricFamily(name, text, value=float(value))

    def _event_families(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        events = self._tail.events
        kinds = Counter(event.kind for event in events)
        counters = {
            "train_nonfinite_total": ("Steps skipped for NaN or infinity.", kinds["nonfinite"]),
            "train_rollbacks_total": ("Returns to a checkpoint after a loss spike.", kinds["rollback"]),
            "train_checkpoints_total": ("Checkpoints saved.", kinds["checkpoint"]),
            "train_checkpoint_failures_total": ("Checkpoints that failed.", kinds["checkpoint_failed"]),
            "train_health_alarms_total": ("Alarms about the recurrence.", kinds["health"]),
        }
        for name, (text, count) in counters.items():
            yield CounterMetricFamily(name, text, value=count)
        reasons = restart_reasons(events)
        restarts = CounterMetricFamily("train_restarts_total", "Starts after the first.", labels=["reason"])
        for reason in RESTART_REASONS:
            restarts.add_metric([reason], reasons[reason])
        yield restarts
        saves = [event for event in events if event.kind == "checkpoint"]
        # Until the first save, what would be lost begins with the run.
        last_safe = saves[-1].time if saves else self._run.read_state().started
        yield GaugeMetricFamily(
            "train_checkpoint_last_success_timestamp_seconds", "Unix time of the last save, or the start.", last_safe
        )
        took = saves[-1].details if saves else {}
        for detail, name, text in (
            ("stall_s", "train_checkpoint_stall_seconds", "Wait of the loop for the last save."),
            ("write_s", "train_checkpoint_write_seconds", "Writing the last save, beside the loop."),
        ):
            if detail in took:
                yield GaugeMetricFamily(name, text, float(took[detail]))
        yield from _perplexities(events)


def _perplexities(events: Sequence[EventRecord]) -> Iterator[Any]:
    from prometheus_client.core import GaugeMetricFamily

    found: dict[str, float] = {}
    for event in events:
        if event.kind == "evaluation" and "perplexity" in event.details and "recurrence" in event.details:
            found[str(event.details["recurrence"])] = float(event.details["perplexity"])
            if "perplexity_one" in event.details:
                found["1"] = float(event.details["perplexity_one"])
    family = GaugeMetricFamily("train_perplexity", "Held-out perplexity by iterations.", labels=["recurrence"])
    for recurrence, value in found.items():
        family.add_metric([recurrence], value)
    yield family


def _cumulative(counts: Sequence[int]) -> list[float]:
    total, sums = 0, []
    for count in counts:
        total += count
        sums.append(float(total))
    return sums


class Exporter:
    """Callback of rank 0: serves the run's metrics and keeps its entry for Prometheus's file discovery."""

    def __init__(
        self,
        run: RunFolder,
        section: MonitoringSection,
        *,
        master: str = "127.0.0.1",
        shares: Shares = lambda: None,
    ) -> None:
        self._run, self._section, self._master = run, section, master
        self.series = RunSeries(run, shares)
        self._server: MetricsServer | None = None
        self._covered = 0
        self._lock = threading.Lock()

    @property
    def address(self) -> str | None:
        """host:port that is served; None while nothing is."""
        return None if self._server is None else "{}:{}".format(*self._server.server_address[:2])

    def on_start(self, step: int, total_steps: int) -> None:
        """Begins to serve; without a free port the run goes on unserved."""
        self._covered = step
        port = self._section.port
        if port is None:
            return
        self.series.begin(step, total_steps)
        host = own_address(self._master) if self._section.host == "auto" else self._section.host
        # The usual port first, so that a firewall rule can name it; then any.
        self._server = open_server(host, (DEFAULT_PORT, 0) if port == "auto" else (port,), self._page)
        if self.address is not None:
            log.info("metrics for Prometheus: http://%s/metrics", self.address)
            write_target(self._run, self.address, self._section.cluster)

    def on_step(self, report: StepReport) -> None:
        """Notes the heartbeat and leaves the numbers for the next scrape."""
        self.series.heartbeat, self.series.step = time.time(), report.step
        self.series.add_step(report.step_s)
        # After a rollback the step count has gone down.
        self._covered = min(self._covered, report.step - 1)
        if report.metrics is not None:
            self.series.add(report.metrics, report.step - self._covered)
            self._covered = report.step

    def on_message(self, text: str) -> None:
        """Messages are events of the run folder, which are read from there."""

    def on_end(self) -> None:
        """Stops serving and takes the entry for discovery away."""
        if self._server is not None:
            remove_target(self._run)
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _page(self) -> bytes:
        from prometheus_client import generate_latest

        with self._lock:
            return generate_latest(self.series)


def target_file(run: RunFolder) -> Path:
    """Returns the file that tells Prometheus where the run is served: beside the run folders, one for each run."""
    return run.path.parent / ".targets" / f"{run.name}.json"


def write_target(run: RunFolder, address: str, cluster: str) -> None:
    """Writes the run's entry for Prometheus's file discovery, whole or not at all; a full disk is only a warning."""
    labels = {"cluster": cluster, "run": run.name, "node": socket.gethostname()}
    path = target_file(run)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        temporary.write_text(json.dumps([{"targets": [address], "labels": labels}]) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        log.warning("Prometheus will not find this run: cannot write %s: %s", path, error.strerror or error)


def remove_target(run: RunFolder) -> None:
    """Removes the run's entry; to be called again, by whoever finds a dead run, does no harm."""
    try:
        target_file(run).unlink(missing_ok=True)
    except OSError as error:
        log.warning("cannot remove %s: %s", target_file(run), error.strerror or error)
