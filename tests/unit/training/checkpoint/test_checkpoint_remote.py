"""The object store client and the uploader, against moto and a store made of a folder."""

from __future__ import annotations

import datetime
import email.utils
import json
import shutil
import threading
import time
from pathlib import Path

import pytest
from botocore.exceptions import (
    ClientError,
    EndpointConnectionError,
    NoCredentialsError,
    ProfileNotFound,
    ReadTimeoutError,
)
from moto import mock_aws

from training.checkpoint import catalog, layout
from training.checkpoint.errors import RemoteError, RemoteUnavailable
from training.checkpoint.remote import MIB, S3Settings, S3Store
from training.checkpoint.remote_errors import translated
from training.checkpoint.upload import Uploader, next_wait_s, pending
from training.checkpoint.upload_progress import is_uploaded, note_uploaded

SETTINGS = S3Settings("s3://ckpts/team/run", part_bytes=5 * MIB, concurrency=3)


@pytest.fixture
def store(monkeypatch):
    for name, value in {
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    with mock_aws():
        store = S3Store(SETTINGS)
        store._client.create_bucket(Bucket="ckpts")
        yield store


@pytest.fixture
def big_checkpoint(tmp_path):
    """A checkpoint with one file of three parts."""
    staged = layout.stage(tmp_path / "root", 10)
    (staged / "big.pt").write_bytes(bytes(range(256)) * (12 * MIB // 256))
    (staged / "small.pt").write_bytes(b"small")
    files = {name: layout.hash_file(staged / name) for name in ("big.pt", "small.pt")}
    manifest = layout.Manifest(10, 1, 1, "fp32", 0, 0, "c", "t", 1.0, files=files)
    return layout.commit(staged, tmp_path / "root", manifest)


def test_settings_split_the_address():
    assert (SETTINGS.bucket, SETTINGS.prefix) == ("ckpts", "team/run/")
    assert S3Settings("s3://b").prefix == ""
    assert S3Settings("s3://b/p/").prefix == "p/"


def test_upload_and_fetch_give_the_same_checkpoint(store, big_checkpoint, tmp_path):
    store.check()
    store.upload(big_checkpoint)
    assert list(store.steps()) == [10]
    assert is_uploaded(big_checkpoint)
    fetched = catalog.fetch(store, 10, tmp_path / "elsewhere")
    assert layout.read_manifest(fetched) == layout.read_manifest(big_checkpoint)
    assert (fetched / "big.pt").read_bytes() == (big_checkpoint / "big.pt").read_bytes()


def test_an_interrupted_upload_goes_on_where_it_stopped(store, big_checkpoint, monkeypatch):
    sent: list[int] = []
    lock = threading.Lock()
    original = store._call

    def failing(operation, **arguments):
        if operation == "upload_part":
            with lock:
                if len(sent) == 2:
                    raise RemoteUnavailable("away", "")
                sent.append(arguments["PartNumber"])
        return original(operation, **arguments)

    monkeypatch.setattr(store, "_call", failing)
    with pytest.raises(RemoteUnavailable):
        store.upload(big_checkpoint)
    assert store.steps() == {}
    again: list[int] = []

    def counting(operation, **arguments):
        if operation in ("upload_part", "put_object"):
            again.append(arguments.get("PartNumber", 0))
        return original(operation, **arguments)

    monkeypatch.setattr(store, "_call", counting)
    store.upload(big_checkpoint)
    # One part and the manifest; neither the small file nor the two parts a second time.
    (missing,) = {1, 2, 3} - set(sent)
    assert sorted(again) == [0, missing]
    assert list(store.steps()) == [10]


def test_an_upload_that_the_store_has_forgotten_starts_again(store, big_checkpoint):
    progress = big_checkpoint.parent / ".upload" / "step-00000010.json"
    progress.parent.mkdir()
    marker = (big_checkpoint / "COMMIT").read_text()
    multipart = {"big.pt": {"id": "gone", "part_bytes": 5 * MIB, "parts": {"1": "etag"}}}
    progress.write_text(json.dumps({"marker": marker, "done": [], "multipart": multipart}))
    store.upload(big_checkpoint)
    assert list(store.steps()) == [10]
    assert not progress.exists()


def test_notes_of_another_save_of_the_step_are_ignored(store, big_checkpoint):
    notes = big_checkpoint.parent / ".upload"
    notes.mkdir()
    (notes / "step-00000010.json").write_text('{"marker": "other", "done": ["small.pt"], "multipart": {}}')
    (notes / "step-00000010.done").write_text("other")
    assert pending(big_checkpoint.parent) == [big_checkpoint]
    store.upload(big_checkpoint)
    assert catalog.fetch(store, 10, big_checkpoint.parent / "x")


def test_the_marker_comes_last_and_once(store, big_checkpoint, make_checkpoint, tmp_path):
    keys = []
    store._client.meta.events.register(
        "before-parameter-build.s3.PutObject", lambda params, **_: keys.append(params["Key"])
    )
    store.upload(big_checkpoint)
    assert keys[-2:] == ["team/run/step-00000010/manifest.json", "team/run/step-00000010/COMMIT"]
    count = len(keys)
    (big_checkpoint.parent / ".upload" / "step-00000010.done").unlink()
    store.upload(big_checkpoint)
    assert len(keys) == count, "what is in the store already is not sent again"


def test_a_step_saved_again_replaces_the_older_one_and_not_the_newer(store, make_checkpoint, tmp_path):
    first = make_checkpoint(tmp_path / "a", 10, created_unix_s=1.0)
    second = make_checkpoint(tmp_path / "b", 10, created_unix_s=2.0)
    store.upload(first)
    store.upload(second)
    assert store.manifest(10).created_unix_s == 2.0
    (tmp_path / "a" / ".upload" / "step-00000010.done").unlink()
    with pytest.raises(RemoteError, match="newer step-00000010"):
        store.upload(first)


def test_two_runs_cannot_both_write_the_marker(store, make_checkpoint, tmp_path):
    folder = make_checkpoint(tmp_path, 10)
    store.upload(folder)
    with pytest.raises(RemoteError, match="another run"):
        store._put_marker(10, b"theirs")
    store._put_marker(10, (folder / "COMMIT").read_bytes())


def test_delete_takes_the_marker_first(store, make_checkpoint, tmp_path):
    store.upload(make_checkpoint(tmp_path, 10))
    keys = []
    store._client.meta.events.register(
        "before-parameter-build.s3.DeleteObject", lambda params, **_: keys.append(params["Key"])
    )
    store.delete(10)
    assert keys[0].endswith("COMMIT")
    assert store._client.list_objects_v2(Bucket="ckpts").get("KeyCount") == 0


def test_damage_in_the_store_is_noticed_on_arrival(store, make_checkpoint, tmp_path):
    store.upload(make_checkpoint(tmp_path / "a", 10))
    store._client.put_object(Bucket="ckpts", Key="team/run/step-00000010/state.json", Body=b"flipped")
    with pytest.raises(RemoteError, match=r"state.json arrived with another sha256"):
        catalog.fetch(store, 10, tmp_path / "b")
    assert catalog.newest_valid(tmp_path / "b", store).folder is None


def test_a_missing_object_or_manifest_is_named(store, make_checkpoint, tmp_path):
    store.upload(make_checkpoint(tmp_path / "a", 10))
    store._client.delete_object(Bucket="ckpts", Key="team/run/step-00000010/state.json")
    with pytest.raises(RemoteError, match="state.json is missing in the store"):
        catalog.fetch(store, 10, tmp_path / "b")
    store._client.delete_object(Bucket="ckpts", Key="team/run/step-00000010/manifest.json")
    with pytest.raises(RemoteError, match="not complete"):
        store.manifest(10)


def test_no_secret_is_in_a_message(store):
    with pytest.raises(RemoteError) as caught:
        S3Store(S3Settings("s3://other-bucket/x")).check()
    assert "there is no bucket other-bucket" in str(caught.value)
    assert "\n" not in caught.value.cause


# --- messages ---


def _response(code: str, status: int, headers: dict[str, str] | None = None) -> ClientError:
    metadata = {"HTTPStatusCode": status, "HTTPHeaders": headers or {}}
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": metadata}, "PutObject")


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (_response("NoSuchBucket", 404), RemoteError, "no bucket ckpts"),
        (_response("SignatureDoesNotMatch", 403), RemoteError, "not valid"),
        (_response("InvalidAccessKeyId", 403), RemoteError, "not valid"),
        (_response("ExpiredToken", 400), RemoteError, "expired"),
        (_response("AccessDenied", 403), RemoteError, "may not PutObject"),
        (_response("RequestTimeTooSkewed", 403), RemoteError, "clock of this machine"),
        (_response("PermanentRedirect", 301), RemoteError, "another region"),
        (_response("EntityTooLarge", 400), RemoteError, "refused PutObject"),
        (_response("SlowDown", 503), RemoteUnavailable, "busy"),
        (_response("Odd", 502), RemoteUnavailable, "in trouble"),
        (NoCredentialsError(), RemoteError, "no complete AWS credentials"),
        (ProfileNotFound(profile="x"), RemoteError, "profile"),
        (EndpointConnectionError(endpoint_url="u"), RemoteUnavailable, "cannot be reached"),
        (ReadTimeoutError(endpoint_url="u"), RemoteUnavailable, "cannot be reached"),
    ],
)
def test_every_refusal_has_one_clear_line(error, kind, words):
    with pytest.raises(kind) as caught, translated("http://store", "ckpts"):
        raise error
    assert words in caught.value.cause
    assert "\n" not in caught.value.cause
    assert caught.value.remedy


def test_the_skew_is_counted_in_minutes():
    there = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(minutes=75)
    error = _response("RequestTimeTooSkewed", 403, {"date": email.utils.format_datetime(there)})
    with pytest.raises(RemoteError, match="75 minutes off"), translated("s", "b"):
        raise error


def test_other_errors_pass_unchanged():
    with pytest.raises(OSError, match="disk"), translated("s", "b"):
        raise OSError("disk")


# --- the uploader ---


class FlakyStore:
    """Copies into a folder; fails as long as `errors` holds an error."""

    def __init__(self, root: Path) -> None:
        self.root, self.errors, self.uploads = root, [], []
        self.gate = threading.Event()
        self.gate.set()

    def upload(self, folder: Path) -> None:
        self.gate.wait(10)
        if self.errors:
            raise self.errors[0]
        shutil.copytree(folder, self.root / folder.name)
        self.uploads.append(folder.name)
        note_uploaded(folder, (folder / "COMMIT").read_bytes())


def _wait_for(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


@pytest.fixture
def flaky(tmp_path):
    return FlakyStore(tmp_path / "store"), tmp_path / "root", []


def _uploader(flaky, **more) -> Uploader:
    store, root, events = flaky
    return Uploader(store, root, lambda *event: events.append(event), first_wait_s=0.01, **more)


def test_what_an_earlier_process_left_is_uploaded_newest_first(flaky, make_checkpoint):
    store, root, events = flaky
    for step in (10, 20, 30):
        make_checkpoint(root, step)
    uploader = _uploader(flaky)
    assert uploader.drain(10)
    assert store.uploads == ["step-00000030", "step-00000020", "step-00000010"]
    assert uploader.close() == []
    assert [event[0] for event in events] == ["checkpoint_uploaded"] * 3


def test_a_checkpoint_that_comes_while_the_uploader_finds_nothing_to_do_is_waited_for(
    flaky, make_checkpoint, monkeypatch
):
    store, root, _ = flaky
    looked, comes = threading.Event(), threading.Event()

    def pending_then_one_comes(folder):
        found = pending(folder)
        if not found and not looked.is_set() and threading.current_thread() is not threading.main_thread():
            looks.append(found)
            if len(looks) == 2:  # the look by which the thread would call itself idle
                looked.set()
                assert comes.wait(10)
        return found

    looks: list[list[Path]] = []
    monkeypatch.setattr("training.checkpoint.upload.pending", pending_then_one_comes)
    uploader = _uploader(flaky)
    assert looked.wait(10)
    make_checkpoint(root, 10)
    uploader.notice()
    comes.set()
    assert uploader.drain(10)
    assert store.uploads == ["step-00000010"]
    assert uploader.close() == []


def test_an_outage_delays_warns_once_and_loses_nothing(flaky, make_checkpoint):
    store, root, events = flaky
    store.errors = [RemoteUnavailable("the object store cannot be reached", "wait")]
    uploader = _uploader(flaky)
    for step in (10, 20):
        make_checkpoint(root, step)
        uploader.notice()
    _wait_for(lambda: uploader._failures >= 3)
    assert not uploader.drain(0)
    assert [event[0] for event in events] == ["checkpoint_upload_delayed"]
    store.errors = []
    assert uploader.drain(10)
    assert sorted(store.uploads) == ["step-00000010", "step-00000020"]
    uploader.close()


def test_a_crash_during_the_outage_leaves_them_for_the_next_process(flaky, make_checkpoint):
    store, root, _ = flaky
    store.errors = [RemoteUnavailable("away", "")]
    make_checkpoint(root, 10)
    uploader = _uploader(flaky)
    _wait_for(lambda: uploader._failures >= 1)
    assert [p.name for p in uploader.close()] == ["step-00000010"]
    store.errors = []
    second = _uploader(flaky)
    assert second.drain(10)
    second.close()


def test_an_unexpected_error_does_not_end_the_thread(flaky, make_checkpoint):
    store, root, events = flaky
    store.errors = [ValueError("surprise")]
    make_checkpoint(root, 10)
    uploader = _uploader(flaky)
    _wait_for(lambda: events)
    assert "ValueError: surprise" in events[0][2]
    store.errors = []
    assert uploader.drain(10)
    uploader.close()


def test_a_checkpoint_that_retention_removed_is_skipped(flaky, make_checkpoint):
    store, root, _ = flaky
    store.gate.clear()
    folder = make_checkpoint(root, 10)
    uploader = _uploader(flaky)
    _wait_for(lambda: uploader.is_uploading(10))
    shutil.rmtree(folder)
    store.gate.set()
    assert uploader.drain(10)
    assert store.uploads == []
    uploader.close()


def test_the_wait_doubles_up_to_a_limit():
    assert [next_wait_s(n) for n in (1, 2, 3, 4)] == [1, 2, 4, 8]
    assert next_wait_s(1000) == 300
