"""Against a real S3 server: killed in the middle of an upload and restarted; wrong keys, bucket and clock."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable

import botocore.auth
import pytest

from tests.system.checkpoint_s3_server import BUCKET, S3Server, use_credentials
from training.checkpoint import catalog, layout
from training.checkpoint.errors import RemoteError, RemoteUnavailable
from training.checkpoint.remote import MIB, S3Settings, S3Store
from training.checkpoint.upload import Uploader

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def store(server, monkeypatch, request):
    use_credentials(monkeypatch)
    url = f"s3://{BUCKET}/{request.node.name.replace('_', '-')}"
    return S3Store(S3Settings(url, server.url, concurrency=2, part_bytes=5 * MIB))


def _make(root, step: int, mebibytes: int):
    staged = layout.stage(root, step)
    (staged / "deepspeed").mkdir()
    block = bytes(range(256)) * (MIB // 256)
    with (staged / "deepspeed" / "shard.pt").open("wb") as file:
        for number in range(mebibytes):
            file.write(number.to_bytes(8, "big") + block[8:])
    (staged / "state.json").write_bytes(b"{}")
    files = {name: layout.hash_file(staged / name) for name in ("deepspeed/shard.pt", "state.json")}
    return layout.commit(staged, root, layout.Manifest(step, 1, 1, "fp32", 0, 0, "c", "t", time.time(), files=files))


def _wait_for(condition: Callable[[], object], timeout_s: float = 40) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def _parts_sent(root) -> int:
    notes = [path.read_text() for path in (root / ".upload").glob("*.json")]
    return max((note.count('"\\"') for note in notes), default=0)


def test_the_server_is_killed_in_the_middle_of_an_upload_and_comes_back(server, store, tmp_path):
    root, events = tmp_path / "root", []
    folder = _make(root, 10, mebibytes=40)
    uploader = Uploader(store, root, lambda *event: events.append(event), first_wait_s=0.2)
    try:
        _wait_for(lambda: _parts_sent(root) >= 2)
        server.kill()
        sent = _parts_sent(root)
        assert sent < 8, "the upload was over before the server was killed"
        _wait_for(lambda: events)
        assert events[0][0] == "checkpoint_upload_delayed"
        assert "cannot be reached" in events[0][2] or "in trouble" in events[0][2]
        _make(root, 20, mebibytes=1)  # training goes on saving
        uploader.notice()
        server.start()
        assert uploader.drain(60)
    finally:
        uploader.close()
    assert sorted(store.steps()) == [10, 20]
    assert [event[0] for event in events].count("checkpoint_upload_delayed") <= 2
    fetched = catalog.fetch(store, 10, tmp_path / "elsewhere")
    assert layout.read_manifest(fetched) == layout.read_manifest(folder)


def test_a_new_process_goes_on_with_the_parts_of_the_old_one(store, tmp_path, monkeypatch):
    folder = _make(tmp_path, 10, mebibytes=20)
    original, sent = store._call, []

    def failing(operation, **arguments):
        if operation == "upload_part":
            if arguments["PartNumber"] > 2:
                raise RemoteUnavailable("as if the process had been killed here", "")
            sent.append(arguments["PartNumber"])
        return original(operation, **arguments)

    monkeypatch.setattr(store, "_call", failing)
    with pytest.raises(RemoteUnavailable):
        store.upload(folder)
    again = S3Store(store.settings)
    resent = []
    call = again._call
    monkeypatch.setattr(
        again,
        "_call",
        lambda operation, **arguments: (
            resent.append(arguments["PartNumber"]) if operation == "upload_part" else None,
            call(operation, **arguments),
        )[1],
    )
    again.upload(folder)
    assert sorted(sent + resent) == [1, 2, 3, 4]
    assert catalog.newest_valid(tmp_path / "elsewhere", again).manifest.step == 10


def test_wrong_secret_wrong_key_and_no_credentials(server, store, monkeypatch):
    for key, secret in (("AKIDLOOPWORKS", "wrong"), ("AKIDSTRANGER", "wrong")):
        use_credentials(monkeypatch, key, secret)
        with pytest.raises(RemoteError, match="AWS credentials are not valid") as caught:
            S3Store(store.settings).check()
        assert "\n" not in caught.value.cause
        assert "wrong" not in str(caught.value)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(RemoteError, match="no complete AWS credentials"):
        S3Store(store.settings).check()


def test_a_missing_bucket(server, store):
    with pytest.raises(RemoteError, match="there is no bucket nowhere at http://127"):
        S3Store(S3Settings("s3://nowhere/x", server.url)).check()


@pytest.mark.parametrize("minutes", [-75, 75])
def test_a_wrong_clock(store, monkeypatch, minutes):
    right = botocore.auth.get_current_datetime
    shift = datetime.timedelta(minutes=minutes)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *args, **more: right(*args, **more) + shift)
    with pytest.raises(RemoteError, match="the clock of this machine is .*off the clock of the object store") as caught:
        store.check()
    assert "set the clock" in caught.value.remedy


def test_nobody_listens_there(store):
    away = S3Store(S3Settings(store.settings.url, "http://127.0.0.1:9"))
    with pytest.raises(RemoteUnavailable, match="cannot be reached"):
        away.check()


def test_the_second_writer_of_a_marker_is_refused_by_the_store(store, tmp_path):
    folder = _make(tmp_path, 10, mebibytes=1)
    store.upload(folder)
    with pytest.raises(RemoteError, match="another run"):
        store._put_marker(10, b"theirs")
    store.delete(10)
    assert store.steps() == {}
