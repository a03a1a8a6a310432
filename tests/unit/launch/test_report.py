"""The page of a run: complete, self-contained, and true to its records."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.errors import StorageError, UsageError
from launch.report import MAX_MARKS, marks, page, time_shares, write_report
from launch.report_plots import MAX_POINTS, Mark, Series, bars, plot, thin, ticks
from training.records import EventRecord, MetricsRecord, RunFolder, RunState

BEGIN = 1_700_000_000.0
VOID = {"meta"}


class Checker(HTMLParser):
    """Follows the nesting of the elements."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def record(step: int, **changes: object) -> MetricsRecord:
    values = {
        **{"time": BEGIN + 60 * step, "step": step, "tokens": step * 10, "loss": 3.0 - step / 100, "grad_norm": 1.0},
        **{"learning_rate": 1e-3, "recurrence": 4.0, "step_s": 50.0, "data_wait_s": 5.0, "tokens_per_s": 100.0},
        **{"flop_per_s": 1e9, "mfu_ratio": 0.4, "state_change_ratio": 0.1, "token_correlation": 0.3},
        **changes,
    }
    return MetricsRecord.model_validate(values)


def event(kind: str, minutes: float, message: str = "", **details: object) -> EventRecord:
    return EventRecord(time=BEGIN + 60 * minutes, kind=kind, step=int(minutes), message=message, details=dict(details))


STATE = RunState(name="a", phase="training", step=20, total_steps=100, started=BEGIN)
METRICS = [record(step) for step in range(1, 21)]
EVENTS = [
    event("start", 0, "2 ranks"),
    event("evaluation", 5, "perplexity", perplexity=9.0, perplexity_one=12.0, recurrence=4),
    event("evaluation", 15, "perplexity", perplexity=8.0, perplexity_one=12.0, recurrence=4),
    event("checkpoint", 10, "saved", stall_s=30.0),
    event("rollback", 12, "went back"),
    event("start", 13, "again"),
]


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    text = page(STATE, METRICS, EVENTS, {"perplexity": {"4": 8.0}, "sample": "x"}, BEGIN)
    checker = Checker()
    checker.feed(text)
    assert not checker.open
    assert not checker.wrong
    assert not re.search(r"https?:|<script|<link|<img|url\(|@import", text)
    for title in ("Loss", "Held-out perplexity by r", "Where the time went", "MFU", "Events", "Sample"):
        assert f"{title}" in text
    assert text.count("went back") >= 2, "on the time axis and in the table"
    assert "r = 4" in text
    assert "width=device-width" in text


def test_text_of_a_run_cannot_become_markup() -> None:
    evil = "<script>alert(1)</script>\"'&"
    state = STATE.model_copy(update={"name": evil, "message": evil})
    result = {"perplexity": {evil: 1.0}, "sample": evil}
    text = page(state, METRICS, [event("rollback", 1, evil), event(evil, 2, evil)], result, BEGIN)
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_values_that_are_not_finite_are_gaps() -> None:
    some = [record(step, loss=None if step in (5, 6) else 2.0, mfu_ratio=None) for step in range(1, 11)]
    text = page(STATE, some, [], None, BEGIN)
    assert "nan" not in text.lower()
    assert ">MFU</h2>" not in text
    assert page(STATE, [record(1, loss=None, grad_norm=None)], [], None, BEGIN).count("no finite values") == 2


def test_shares_of_time_add_up() -> None:
    shares = time_shares(METRICS, EVENTS)
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["waiting for data"] == pytest.approx(19 * 5 / (19 * 60))
    assert shares["saves"] == pytest.approx(30 / (19 * 60))
    assert shares["steps"] == pytest.approx(19 * 45 / (19 * 60))
    assert time_shares(METRICS[:1], []) == {}


def test_the_parts_of_a_step_are_told_where_they_were_measured() -> None:
    measured = [
        record.model_copy(update={"forward_s": 10.0, "backward_s": 20.0, "optimizer_s": 5.0}) for record in METRICS
    ]
    shares = time_shares(measured, EVENTS)
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["forward"] == pytest.approx(10 / 60)
    assert shares["other parts of steps"] == pytest.approx((50 - 10 - 20 - 5 - 5) / 60)
    assert "steps" not in shares


def test_of_many_events_the_rare_ones_are_marked() -> None:
    many = [event("checkpoint", minute) for minute in range(1000)] + [event("rollback", 500.5)]
    found = marks(many, BEGIN)
    assert len(found) == MAX_MARKS
    assert any(mark.text.startswith("rollback") for mark in found)


def test_a_resumed_run_begins_at_its_first_start() -> None:
    later = STATE.model_copy(update={"started": BEGIN + 600})
    text = page(later, METRICS, EVENTS, None, BEGIN)
    assert "-" not in re.findall(r'text-anchor="middle">([^<]*)<', text)[0]


def test_the_file_lies_in_the_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a")
    run.path.mkdir()
    with pytest.raises(UsageError, match="no metrics"):
        write_report(run)
    run.write_state(STATE)
    run.append(record(1))
    run.event("start", 0, "2 ranks")
    began = time.perf_counter()
    assert write_report(run) == run.path / "report.html"
    assert time.perf_counter() - began < 5
    with pytest.raises(StorageError, match="--out"):
        write_report(run, str(tmp_path / "no" / "folder" / "x.html"))


finite = st.floats(-1e6, 1e6)


@given(st.lists(finite | st.none(), max_size=3000))
def test_thinning_keeps_the_extremes(values: list[float | None]) -> None:
    points = [(float(index), value) for index, value in enumerate(values)]
    kept = thin(points)
    assert len(kept) <= MAX_POINTS + 2
    assert kept == sorted(kept, key=lambda point: point[0])
    known = [value for value in values if value is not None]
    if known:
        left = [value for _, value in kept if value is not None]
        assert (min(left), max(left)) == (min(known), max(known))


@given(finite, st.floats(1e-6, 1e6))
def test_ticks_are_few_and_inside(low: float, span: float) -> None:
    found = ticks(low, low + span)
    assert len(found) <= 10
    assert all(low - span * 1e-3 <= tick <= low + span * 1.001 for tick in found)


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(allow_nan=True, allow_infinity=True) | st.none()), max_size=30))
def test_any_values_can_be_drawn(points: list[tuple[float, float | None]]) -> None:
    drawn = plot([Series("a", sorted(points, key=lambda point: point[0]))], [Mark(0.5, "#000000", "x")])
    assert "nan" not in drawn.lower()
    assert "inf" not in drawn.replace("no finite values", "")


def test_bars_without_shares_say_so() -> None:
    assert "two log intervals" in bars({})
