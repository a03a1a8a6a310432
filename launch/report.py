"""`fab report`: one self-contained HTML page of a run, from its folder: no script, nothing that a browser would load.

Where a Prometheus has watched the run, it adds what GPUs and network did (launch/report_prometheus.py).

The page says how the run ended, what it learned and where its time went; events and restarts are marked on the time
axis of every plot. `page` is a pure function of the records; the plots are in launch/report_plots.py.
"""

from __future__ import annotations

import html
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from launch.errors import StorageError, UsageError
from launch.monitor_files import cluster_of
from launch.report_plots import Mark, Series, bars, plot
from launch.report_prometheus import monitor_address, read_plots
from launch.runs import observed_state
from training.records import EventRecord, MetricsRecord, RunFolder, RunState

# What is worth a mark on the time axis, in the colour of its kind.
MARKED = {
    "start": "#2b7a3d",
    "evaluation": "#3467a8",
    "checkpoint": "#8a8a8a",
    "nonfinite": "#c0392b",
    "rollback": "#c0392b",
    "checkpoint_failed": "#c0392b",
    "out_of_memory": "#c0392b",
    "health": "#b8860b",
    "stopped": "#b8860b",
    "end": "#2b7a3d",
}
_LEGEND = (
    "Dashed lines are events, listed below: green start and end, blue evaluation, grey checkpoint, "
    "yellow stop and health, red fault."
)
MAX_MARKS, MAX_EVENTS = 200, 400
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #667085; --line: #d8dee8; --paper: #ffffff; --box: #f5f7fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --soft: #98a2b3; --line: #3a4353; --paper: #14181f; --box: #1c222c; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; font: 16px/1.45 system-ui, sans-serif;
       color: var(--ink); background: var(--paper); }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 0 0 .4rem; }
.soft { color: var(--soft); margin: 0 0 1rem; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .6rem; margin: 0 0 1rem; }
.numbers div { background: var(--box); border-radius: .4rem; padding: .5rem .7rem; }
.numbers b { display: block; font-size: 1.25rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem; }
section { background: var(--box); border-radius: .4rem; padding: .7rem; min-width: 0; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
.wide { overflow-x: auto; margin-top: 1rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: .2rem .6rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number { white-space: nowrap; text-align: right; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
"""


def write_report(folder: RunFolder, out: str | None = None, prometheus: str | None = None) -> Path:
    """Writes the page of a run (default: report.html in its folder) and returns its path.

    `prometheus` is the address of one that has watched the run; without it, that of a running `fab monitor` is asked.
    Raises UsageError for a run without metrics and for a Prometheus that was named and does not answer, StorageError
    when the file cannot be written.
    """
    metrics = folder.read_metrics()
    if not metrics:
        raise UsageError(
            f"run {folder.name} has no metrics yet", "wait for its first log interval, or see fab logs for why it ended"
        )
    path = Path(out) if out else folder.path / "report.html"
    state = observed_state(folder)
    watched = _watched(folder, prometheus, begin_of(state, metrics), metrics[-1].time)
    text = page(state, metrics, folder.read_events(), _result(folder), now=time.time(), watched=watched)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}", "choose another place with --out"
        ) from None
    return path


def page(
    state: RunState,
    metrics: Sequence[MetricsRecord],
    events: Sequence[EventRecord],
    result: dict[str, Any] | None,
    now: float,
    watched: Sequence[tuple[str, Sequence[Series]]] = (),
) -> str:
    """Returns the HTML. Times are in hours since the first start; text from the run is escaped.

    `watched`: further plots, (title, lines), of what others have seen of the run.
    """
    begin = begin_of(state, metrics)
    made = time.strftime("%Y-%m-%d %H:%M", time.gmtime(now))
    parts = [
        f"<h1>{_text(state.name)}</h1>",
        f'<p class="soft">{_text(_headline(state))}; page of {made} UTC</p>',
        _numbers(state, metrics, begin),
        f'<p class="soft">{_text(_LEGEND)}</p>',
        '<div class="plots">',
        *(f"<section><h2>{_text(title)}</h2>{svg}</section>" for title, svg in _plots(metrics, events, begin)),
        *(
            f"<section><h2>{_text(title)}</h2>{plot(lines, marks(events, begin), zero=True)}</section>"
            for title, lines in watched
        ),
        "</div>",
        _result_table(result),
        _event_table(events, begin),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(state.name)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body>\n</html>\n"
    )


def begin_of(state: RunState, metrics: Sequence[MetricsRecord]) -> float:
    """Returns when the run first started, unix time; one that was resumed has a later start in its state."""
    first = metrics[0]
    return state.started if 0 < state.started <= first.time else first.time - first.step_s


def marks(events: Iterable[EventRecord], begin: float) -> list[Mark]:
    """Returns the marks of the time axis; when there are too many, those of the rarer kinds."""
    by_kind: dict[str, list[EventRecord]] = {}
    for event in events:
        if event.kind in MARKED:
            by_kind.setdefault(event.kind, []).append(event)
    chosen: list[EventRecord] = []
    for found in sorted(by_kind.values(), key=len):
        chosen += found[: max(0, MAX_MARKS - len(chosen))]
    return [
        Mark((event.time - begin) / 3600, MARKED[event.kind], f"{event.kind}: {event.message}")
        for event in sorted(chosen, key=lambda event: event.time)
    ]


def time_shares(metrics: Sequence[MetricsRecord], events: Sequence[EventRecord]) -> dict[str, float]:
    """Returns the share of wall time by phase between the first record and the last.

    Steps: forward, backward and optimizer where the run has measured them, each with its waiting for other ranks, and
    waiting for data. Between steps: saves where their events say how long, and the rest (evaluations, starts, time in
    which the run did not run).
    """
    first, last = metrics[0], metrics[-1]
    total = last.time - first.time
    if total <= 0:
        return {}
    step_s = 0.0
    parts = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0, "waiting for data": 0.0}
    for before, record in zip(metrics, metrics[1:], strict=False):
        steps = max(1, record.step - before.step)
        step_s += record.step_s * steps
        measured = (record.forward_s, record.backward_s, record.optimizer_s, record.data_wait_s)
        for name, part_s in zip(parts, measured, strict=True):
            parts[name] += (part_s or 0.0) * steps
    saves = sum(float(e.details.get("stall_s", 0.0)) for e in events if e.kind == "checkpoint")
    rest = max(0.0, total - step_s - saves)
    whole = max(total, step_s + saves)
    known = {name: seconds for name, seconds in parts.items() if seconds or name == "waiting for data"}
    left = max(0.0, step_s - sum(known.values()))
    return {
        ("steps" if len(known) == 1 else "other parts of steps"): left / whole,
        **{name: seconds / whole for name, seconds in known.items()},
        "saves": saves / whole,
        "evaluation, starts, other": rest / whole,
    }


def _plots(metrics: Sequence[MetricsRecord], events: Sequence[EventRecord], begin: float) -> Iterable[tuple[str, str]]:
    at = [(record.time - begin) / 3600 for record in metrics]
    along = marks(events, begin)

    def of(name: str, label: str = "") -> Series:
        return Series(label or name.replace("_", " "), list(zip(at, [getattr(m, name) for m in metrics], strict=True)))

    yield "Loss, nats a token", plot([of("loss")], along)
    perplexity = _perplexity(events, begin)
    # One evaluation alone, that at the end, is told by the table.
    if any(len(series.points) > 1 for series in perplexity):
        yield "Held-out perplexity by r", plot(perplexity, along)
    yield "Tokens a second", plot([of("tokens_per_s")], along, zero=True)
    yield "Where the time went", bars(time_shares(metrics, events))
    if any(m.mfu_ratio is not None for m in metrics):
        yield "MFU", plot([of("mfu_ratio")], along, zero=True)
    yield (
        "Seconds of a step",
        plot([of("step_s", "step"), of("data_wait_s", "of it waiting for data")], along, zero=True),
    )
    yield "Gradient norm", plot([of("grad_norm")], along, zero=True)
    yield "Learning rate", plot([of("learning_rate")], along, zero=True)
    yield "Core iterations", plot([of("recurrence")], along)
    if any(m.token_correlation is not None for m in metrics):
        health = [
            of("token_correlation", "correlation of token states"),
            of("state_change_ratio", "change in the last iteration"),
        ]
        yield "Health of the recurrence", plot(health, along, zero=True)


def _perplexity(events: Sequence[EventRecord], begin: float) -> list[Series]:
    found: dict[str, list[tuple[float, float | None]]] = {}
    for event in events:
        if event.kind != "evaluation" or "perplexity" not in event.details:
            continue
        hours = (event.time - begin) / 3600
        found.setdefault(str(event.details.get("recurrence", "?")), []).append((hours, event.details["perplexity"]))
        if "perplexity_one" in event.details:
            found.setdefault("1", []).append((hours, event.details["perplexity_one"]))
    return [
        Series(f"r = {r}", sorted(points)) for r, points in sorted(found.items(), key=lambda item: item[0].zfill(9))
    ]


def _headline(state: RunState) -> str:
    planned = f" of {state.total_steps:,}" if state.total_steps else ""
    return f"{state.phase}, step {state.step:,}{planned}" + (f": {state.message}" if state.message else "")


def _numbers(state: RunState, metrics: Sequence[MetricsRecord], begin: float) -> str:
    last = metrics[-1]
    rows = {
        "loss": "not finite" if last.loss is None else f"{last.loss:.3f}",
        "tokens": f"{last.tokens:,}",
        "tokens a second": f"{last.tokens_per_s:,.0f}",
        "MFU": "unknown" if last.mfu_ratio is None else f"{last.mfu_ratio:.1%}",
        "FLOP a second": f"{last.flop_per_s:.3g}",
        "waiting for data": f"{last.data_wait_s / last.step_s:.1%}" if last.step_s else "unknown",
        "hours": f"{(last.time - begin) / 3600:.2f}",
        "step": f"{max(state.step, last.step):,}",
    }
    cells = "".join(f"<div>{_text(name)}<b>{_text(value)}</b></div>" for name, value in rows.items())
    return f'<div class="numbers">{cells}</div>'


def _result_table(result: dict[str, Any] | None) -> str:
    if not result:
        return ""
    rows = [(f"this model, r = {r}", value) for r, value in result.get("perplexity", {}).items()]
    rows += [
        (f"{kind} model", result[f"{kind}_perplexity"])
        for kind in ("bigram", "unigram")
        if f"{kind}_perplexity" in result
    ]
    body = "".join(f'<tr><td>{_text(name)}</td><td class="number">{value:,.2f}</td></tr>' for name, value in rows)
    sample = f"<h2>Sample</h2><pre>{_text(result['sample'])}</pre>" if result.get("sample") else ""
    return f'<section class="wide"><h2>Held-out perplexity at the end</h2><table>{body}</table>{sample}</section>'


def _event_table(events: Sequence[EventRecord], begin: float) -> str:
    rows = [
        f'<tr><td class="number">{(event.time - begin) / 3600:.2f} h</td><td class="number">{event.step:,}</td>'
        f"<td>{_text(event.kind)}</td><td>{_text(event.message)}</td></tr>"
        for event in events[-MAX_EVENTS:]
    ]
    left = f" (the last {MAX_EVENTS} of {len(events):,})" if len(events) > MAX_EVENTS else ""
    head = "<tr><th>after</th><th>step</th><th>event</th><th></th></tr>"
    return f'<section class="wide"><h2>Events{left}</h2><table>{head}{"".join(rows)}</table></section>'


def _watched(
    folder: RunFolder, prometheus: str | None, begin: float, end: float
) -> Sequence[tuple[str, Sequence[Series]]]:
    """Asks Prometheus. That of a `fab monitor` is a bonus: when it does not answer, the page is made without it."""
    address = prometheus or monitor_address(folder.path.parent)
    if address is None:
        return ()
    try:
        return read_plots(address, cluster_of(folder), folder.name, begin, end)
    except UsageError:
        if prometheus is not None:
            raise
        return ()


def _result(folder: RunFolder) -> dict[str, Any] | None:
    if not folder.result.is_file():
        return None
    return dict(json.loads(folder.result.read_text(encoding="utf-8")))


def _text(value: str) -> str:
    return html.escape(value, quote=True)
