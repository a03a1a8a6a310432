"""Signals, the exit code and the metadata watcher (against a small server on the loopback address)."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from training.preemption import (
    MetadataWatcher,
    Notice,
    StopFlag,
    exit_code,
    read_notice,
    signals_request_stop,
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_sets_the_flag_and_interrupts_nothing(number):
    flag = StopFlag()
    with signals_request_stop(flag):
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        assert flag.stop
        assert flag.reason == f"signal {signal.Signals(number).name}"


def test_the_handlers_are_put_back():
    before = signal.getsignal(signal.SIGUSR1)
    with signals_request_stop(StopFlag()):
        assert signal.getsignal(signal.SIGUSR1) != before
    assert signal.getsignal(signal.SIGUSR1) == before


def test_exit_codes():
    assert exit_code({}) == 75
    assert exit_code({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == 143


def test_a_save_request_is_answered_once():
    flag = StopFlag()
    flag.request_save("rebalance")
    assert (flag.save, flag.stop) == (True, False)
    flag.saved()
    assert not flag.save


def test_reading_notices():
    assert read_notice(lambda path: None) is None
    answers = {"/latest/meta-data/spot/instance-action": '{"action": "terminate", "time": "2030-01-01T00:00:00Z"}'}
    assert read_notice(answers.get) == Notice("interruption", "spot terminate at 2030-01-01T00:00:00Z")
    answers = {"/latest/meta-data/events/recommendations/rebalance": '{"noticeTime": "now"}'}
    assert read_notice(answers.get) == Notice("rebalance", "rebalance recommended at now")
    assert read_notice({"/latest/meta-data/spot/instance-action": "garbage"}.get).kind == "interruption"


class _Metadata:
    """The metadata service of an instance: tokens required, answers as set."""

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}
        self.token, self.tokens_given, self.answered, self.status = "t1", 0, 0, 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self):
                ok = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
                outer.tokens_given += 1
                self._answer(200 if ok else 400, outer.token)

            def do_GET(self):
                if self.headers.get("X-aws-ec2-metadata-token") != outer.token:
                    self._answer(401, "")
                elif outer.status != 200:
                    self._answer(outer.status, "")
                else:
                    outer.answered += 1
                    text = outer.answers.get(self.path)
                    self._answer(404 if text is None else 200, text or "")

            def _answer(self, code, text):
                self.send_response(code)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


@pytest.fixture
def metadata():
    service = _Metadata()
    yield service
    service.server.shutdown()
    service.server.server_close()


@pytest.fixture
def watch(metadata):
    flag = StopFlag()
    watcher = MetadataWatcher(flag, metadata.url, interval_s=0.01)
    yield metadata, flag, watcher
    watcher.close()


def _wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def test_a_spot_interruption_requests_a_stop(watch):
    metadata, flag, _ = watch
    _wait_for(lambda: metadata.tokens_given)
    assert not flag.stop
    notice = {"action": "terminate", "time": "2030-01-01T00:02:00Z"}
    metadata.answers["/latest/meta-data/spot/instance-action"] = json.dumps(notice)
    _wait_for(lambda: flag.stop)
    assert flag.reason == "spot terminate at 2030-01-01T00:02:00Z"


def test_a_rebalance_recommendation_requests_one_save(watch):
    metadata, flag, watcher = watch
    metadata.answers["/latest/meta-data/events/recommendations/rebalance"] = '{"noticeTime": "soon"}'
    _wait_for(lambda: flag.save)
    flag.saved()
    time.sleep(0.05)
    assert not flag.save
    assert not flag.stop
    assert watcher.alive


def test_an_expired_token_is_renewed(watch):
    metadata, flag, _ = watch
    _wait_for(lambda: metadata.tokens_given)
    metadata.token = "t2"
    metadata.answers["/latest/meta-data/spot/instance-action"] = "{}"
    _wait_for(lambda: flag.stop)
    assert metadata.tokens_given == 2


def test_a_service_in_trouble_is_asked_again(watch):
    metadata, flag, watcher = watch
    _wait_for(lambda: metadata.answered > 2)  # two questions a look: the first look is over
    metadata.status = 500
    time.sleep(0.1)
    assert watcher.alive
    metadata.status = 200
    metadata.answers["/latest/meta-data/spot/instance-action"] = "{}"
    _wait_for(lambda: flag.stop)


def test_a_machine_without_the_service_is_left_alone():
    flag = StopFlag()
    watcher = MetadataWatcher(flag, "http://127.0.0.1:9", interval_s=0.01)
    _wait_for(lambda: not watcher.alive)
    assert not flag.stop
