"""What Prometheus adds to a run's page, with a stand-in that answers queries of a range."""

from __future__ import annotations

import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from launch.errors import UsageError
from launch.report import write_report
from launch.report_prometheus import ADDRESS_FILE, MAX_POINTS, PLOTS, monitor_address, points, read_plots, selector
from tests.unit.launch.test_report import BEGIN, METRICS, STATE
from training.records import RunFolder

END = METRICS[-1].time


class StandIn(ThreadingHTTPServer):
    """Answers each query with a line that says 97, or with nothing when the query names a word of `unknown`."""

    daemon_threads = True

    def __init__(self) -> None:
        self.asked: list[dict[str, str]] = []
        self.unknown: tuple[str, ...] = ()
        self.body: bytes | None = None
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/prometheus"


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_POST(self) -> None:
        assert self.path == "/prometheus/api/v1/query_range"
        form = urllib.parse.parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        asked = {name: values[0] for name, values in form.items()}
        self.server.asked.append(asked)
        begin, end, step = (float(asked[name]) for name in ("start", "end", "step"))
        values = [[begin + index * step, "97"] for index in range(int((end - begin) / step) + 1)]
        known = not any(word in asked["query"] for word in self.server.unknown)
        answer = {"status": "success", "data": {"result": [{"metric": {}, "values": values}] if known else []}}
        body = json.dumps(answer).encode() if self.server.body is None else self.server.body
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def prometheus() -> Iterator[StandIn]:
    server = StandIn()
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "a")
    folder.path.mkdir()
    folder.write_state(STATE)
    folder.config.write_text("monitoring:\n  cluster: east\n")
    for record in METRICS:
        folder.append(record)
    return folder


def test_plots_of_the_run_and_of_no_other(prometheus: StandIn) -> None:
    found = read_plots(prometheus.url, "east", "a", BEGIN, END)
    assert [title for title, _ in found] == [plot.title for plot in PLOTS]
    assert all('{cluster="east", run="a"' in asked["query"] for asked in prometheus.asked)
    assert not any("$" in asked["query"] for asked in prometheus.asked)
    (mean, *_) = found[0][1]
    assert mean.label == "mean"
    assert mean.points[0] == (0.0, 97.0)
    assert mean.points[-1][0] == pytest.approx((END - BEGIN) / 3600, abs=0.01)


def test_a_long_run_is_asked_for_no_more_than_can_be_drawn(prometheus: StandIn) -> None:
    read_plots(prometheus.url, "east", "a", BEGIN, BEGIN + 90 * 24 * 3600)
    assert all(90 * 24 * 3600 / float(asked["step"]) <= MAX_POINTS for asked in prometheus.asked)


def test_what_nobody_measured_has_no_plot(prometheus: StandIn) -> None:
    prometheus.unknown = ("DCGM", "fabric")
    titles = [title for title, _ in read_plots(prometheus.url, "east", "a", BEGIN, END)]
    assert titles == ["Ethernet, bytes a second and node (no RDMA traffic)", "Exposed communication, share of time"]


def test_missing_samples_are_gaps() -> None:
    assert points([[60, "1"], [120, "2"], [300, "NaN"]], 0.0, 60.0) == [
        (60 / 3600, 1.0),
        (120 / 3600, 2.0),
        (180 / 3600, None),
        (300 / 3600, None),
    ]


def test_names_cannot_change_the_query() -> None:
    assert selector("c", 'x"} or up{a="') == 'cluster="c", run="x\\"} or up{a=\\""'


def test_the_page_has_them_and_still_needs_nothing_else(prometheus: StandIn, run: RunFolder) -> None:
    text = write_report(run, prometheus=prometheus.url).read_text()
    assert all(f"<h2>{plot.title}</h2>" in text for plot in PLOTS)
    assert "highest node" in text
    assert not re.search(r"https?:|<script|<link|<img|url\(|@import", text)


def test_a_monitor_that_runs_is_asked(prometheus: StandIn, run: RunFolder) -> None:
    state = run.path.parent / ".monitor"
    state.mkdir()
    (state / ADDRESS_FILE).write_text(prometheus.url + "\n")
    assert monitor_address(run.path.parent) == prometheus.url
    assert "GPU utilisation" in write_report(run).read_text()
    (state / ADDRESS_FILE).unlink()
    assert monitor_address(run.path.parent) is None
    assert "GPU utilisation" not in write_report(run).read_text()


def test_a_prometheus_that_was_named_has_to_answer(prometheus: StandIn, run: RunFolder) -> None:
    nobody = "http://127.0.0.1:9/prometheus"
    with pytest.raises(UsageError, match="no answer of Prometheus") as caught:
        write_report(run, prometheus=nobody)
    assert "--prometheus" in caught.value.remedy
    prometheus.body = b"<html>another server</html>"
    with pytest.raises(UsageError, match="no answer of Prometheus"):
        write_report(run, prometheus=prometheus.url)
    # One that nobody has named is a bonus.
    (run.path.parent / ".monitor").mkdir()
    (run.path.parent / ".monitor" / ADDRESS_FILE).write_text(nobody)
    assert "GPU utilisation" not in write_report(run).read_text()
