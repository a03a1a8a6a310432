"""What monitoring costs a step: marks of phases, callbacks, scrapes thirty times as often as usual, hanging clients.

    OMP_NUM_THREADS=1 python -m benchmarks.exporter [--step-ms 100] [--rounds 9]

A step is a fixed amount of Python and numpy on one thread, which competes with the exporter's thread for the
interpreter lock as a training step does. Rounds with and without the exporter take turns; the share is the median over
pairs of neighbours, in processor time of this process, so that other processes do not count. A scrape can hold a step
up by no more than the page takes.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.machine import description
from training.callbacks import Callback, StepReport
from training.config.schema import MonitoringSection
from training.metrics import Exporter
from training.metrics_server import MAX_CLIENTS
from training.observers import SaveRequests
from training.phases import PhaseClock, seconds_by_phase
from training.records import MetricsRecord, RunFolder, RunState

STEPS_A_ROUND, MICRO_STEPS = 20, 4
LIMIT = 0.005
SCRAPE_INTERVAL_S, USUAL_INTERVAL_S = 0.5, 15.0


def work(units: int) -> None:
    """A fixed amount of work, part of it without the interpreter lock."""
    matrix = np.ones((160, 160))
    for _ in range(units):
        matrix = matrix @ matrix * 1e-3
        sum(range(200))


def units_for(seconds: float) -> int:
    """Returns how much work takes so long here."""
    began = time.perf_counter()
    work(400)
    return max(1, round(400 * seconds / (time.perf_counter() - began)))


def record(step: int) -> MetricsRecord:
    """Returns a record such as the loop makes at each log interval."""
    values = {"loss": 2.0, "grad_norm": 1.0, "learning_rate": 1e-3, "recurrence": 4.0, "step_s": 0.1}
    values |= {"data_wait_s": 0.001, "forward_s": 0.03, "backward_s": 0.06, "optimizer_s": 0.005}
    rates = {"tokens_per_s": 100.0, "flop_per_s": 1e9, "mfu_ratio": None}
    return MetricsRecord.model_validate({"time": time.time(), "step": step, "tokens": step, **values, **rates})


def marks(clock: PhaseClock) -> StepReport:
    """Takes the marks of a step and returns what the loop tells the callbacks about it."""
    clock.begin()
    for _ in range(MICRO_STEPS):
        for phase in ("data", "forward", "backward"):
            clock.mark(phase)
    clock.mark("optimizer")
    spans = clock.end()
    seconds_by_phase(spans)
    return StepReport(0, 10**6, None, 0.1, tuple(spans))


def one_round(units: int, callbacks: Sequence[Callback], first_step: int) -> float:
    """Returns the processor seconds of STEPS_A_ROUND steps that log each."""
    clock = PhaseClock()
    began = time.process_time()
    for step in range(first_step, first_step + STEPS_A_ROUND):
        work(units)
        if callbacks:
            report = replace(marks(clock), step=step, metrics=record(step))
            for callback in callbacks:
                callback.on_step(report)
    return time.process_time() - began


def scrape_forever(address: str, stop: threading.Event, times: list[float]) -> None:
    """Asks for the page at each interval; in operation this is another process, here it costs the step too."""
    while not stop.wait(SCRAPE_INTERVAL_S):
        began = time.perf_counter()
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            answer.read()
        times.append(time.perf_counter() - began)


def main() -> None:
    """Prints the shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    units = units_for(options.step_ms / 1000)
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder) / "runs" / "bench")
        run.path.mkdir(parents=True)
        run.write_state(RunState(name="bench", phase="training", started=time.time()))
        for number in range(500):
            run.event("checkpoint", number, "saved", stall_s=0.01)
        exporter = Exporter(run, MonitoringSection(host="127.0.0.1"))
        exporter.on_start(0, 10**6)
        callbacks = (exporter, SaveRequests(run, print))
        measure(units, callbacks, exporter.address or "", options)
        exporter.on_end()


def measure(units: int, callbacks: Sequence[Callback], address: str, options: argparse.Namespace) -> None:
    """Takes turns and prints."""
    print(description())
    step_s, clock = options.step_ms / 1000, PhaseClock()
    began = time.perf_counter()
    for step in range(1, 10_001):
        for callback in callbacks:
            callback.on_step(StepReport(step, 10**6, None, 0.1))
    call_s = (time.perf_counter() - began) / 10_000
    print(f"callbacks: {call_s * 1e6:.1f} us a step, {call_s / step_s:.4%} of {options.step_ms:.0f} ms")
    began = time.perf_counter()
    for _ in range(10_000):
        marks(clock)
    mark_s = (time.perf_counter() - began) / 10_000
    print(f"phases of {MICRO_STEPS} micro-batches: {mark_s * 1e6:.1f} us a step, {mark_s / step_s:.4%}")
    shares: list[float] = []
    times: list[float] = []
    first = 10_001
    for _ in range(options.rounds):
        plain = one_round(units, (), first)
        stop = threading.Event()
        client = threading.Thread(target=scrape_forever, args=(address, stop, times))
        client.start()
        observed = one_round(units, callbacks, first)
        stop.set()
        client.join()
        shares.append(observed / plain - 1)
        first += STEPS_A_ROUND
    share = statistics.median(shares)
    spread = f"{min(shares):+.2%} to {max(shares):+.2%}"
    print(f"with a scrape each {SCRAPE_INTERVAL_S} s (client included): {share:+.2%} of step time ({spread})")
    page_s = statistics.median(times)
    print(
        f"page: {page_s * 1000:.1f} ms a scrape; each {USUAL_INTERVAL_S:.0f} s: {page_s / USUAL_INTERVAL_S:.4%} of time"
    )
    whole = (call_s + mark_s) / step_s + page_s / USUAL_INTERVAL_S
    print(f"together, at a scrape each {USUAL_INTERVAL_S:.0f} s: {whole:.2%} of step time (limit {LIMIT:.1%})")
    hanging = [socket.create_connection(_split(address)) for _ in range(MAX_CLIENTS)]
    plain, held = one_round(units, (), first), one_round(units, callbacks, first)
    print(f"with {MAX_CLIENTS} hanging clients: {held / plain - 1:+.2%} (one round)")
    for connection in hanging:
        connection.close()


def _split(address: str) -> tuple[str, int]:
    host, port = address.rsplit(":", 1)
    return host, int(port)


if __name__ == "__main__":
    main()
