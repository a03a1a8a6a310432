"""Datasets and sources in an object store: a small S3 server runs in this process."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from data_samples import make_text, small_settings
from moto.server import ThreadedMotoServer

from training.data import Cursor, open_dataset, s3
from training.data.manifest import read_manifest
from training.data.prepare import prepare
from training.data.staging import StagedFolder
from training.errors import DataError, UsageError


@pytest.fixture(scope="module")
def server():
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    _, port = running.get_host_and_port()
    yield f"http://127.0.0.1:{port}"
    running.stop()


@pytest.fixture
def bucket(server, monkeypatch):
    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3, "FIRST_PAUSE_S", 0.01)
    s3.client.cache_clear()
    store = s3.client()
    store.create_bucket(Bucket="data")
    yield store
    for entry in store.list_objects_v2(Bucket="data").get("Contents", []):
        store.delete_object(Bucket="data", Key=entry["Key"])
    store.delete_bucket(Bucket="data")
    s3.client.cache_clear()


def upload(store, folder, prefix):
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.upload_file(str(path), "data", f"{prefix}/{path.relative_to(folder)}")


def cached(tmp_path):
    return [p for p in (tmp_path / "cache").rglob("*") if p.is_file() and p.suffix in {".tfrecord", ".h5"}]


def test_a_dataset_is_read_from_the_store_as_from_disk(bucket, prepared, tmp_path):
    upload(bucket, prepared, "set")
    dataset = open_dataset("s3://data/set/", cache_dir=tmp_path / "cache")
    local = open_dataset(prepared)
    assert cached(tmp_path) == []  # nothing is fetched before it is read
    order = dataset.order(3, 0, np.arange(len(dataset)))
    assert np.array_equal(dataset.read(order), local.read(order))
    assert len(cached(tmp_path)) == len(read_manifest(prepared).splits["train"])
    again = open_dataset("s3://data/set", cache_dir=tmp_path / "cache")
    bucket.delete_object(Bucket="data", Key=f"set/{read_manifest(prepared).splits['train'][0].file}")
    assert np.array_equal(again[0], local[0])  # from the cache


def test_shards_are_fetched_ahead_of_use(bucket, prepared, tmp_path):
    loader = pytest.importorskip("training.data.loader")
    upload(bucket, prepared, "set")
    dataset = open_dataset("s3://data/set", cache_dir=tmp_path / "cache")
    shards = len(read_manifest(prepared).splits["train"])
    batches = loader.make_loader(
        dataset, seed=1, cursor=Cursor(), global_batch_size=1, micro_batch_size=1, stage_ahead=len(dataset)
    )
    next(batches)
    deadline = time.monotonic() + 20
    while len(cached(tmp_path)) < shards and time.monotonic() < deadline:
        threading.Event().wait(0.02)
    assert len(cached(tmp_path)) == shards


def test_the_cache_keeps_to_its_limit(bucket, prepared, tmp_path):
    upload(bucket, prepared, "set")
    shards = read_manifest(prepared).splits["train"]
    limit = sum(shard.bytes for shard in shards) // 2
    with pytest.raises(DataError, match=r"its local cache may have \d+ \(data.cache_limit_bytes\)"):
        open_dataset("s3://data/set", cache_dir=tmp_path / "cache", cache_limit_bytes=limit)
    dataset = open_dataset(
        "s3://data/set", cache_dir=tmp_path / "cache", cache_limit_bytes=limit, shuffle_window_bytes=limit // 4
    )
    local = open_dataset(prepared)
    dataset._max_open = 1
    for index in dataset.order(5, 0, np.arange(len(dataset))).tolist():
        assert np.array_equal(dataset[index], local[index])
        assert sum(path.stat().st_size for path in cached(tmp_path)) <= limit
    with pytest.raises(DataError, match="is larger than data.cache_limit_bytes"):
        open_dataset("s3://data/set", cache_dir=tmp_path / "other", cache_limit_bytes=100, shuffle_window_bytes=1).read(
            np.array([0])
        )


def test_a_file_that_another_process_takes_out_of_the_cache_is_not_counted(bucket, prepared, tmp_path, monkeypatch):
    upload(bucket, prepared, "set")
    shards = read_manifest(prepared).splits["train"]
    names = [Path(shard.file).name for shard in shards]
    cache = StagedFolder("s3://data/set", tmp_path / "cache", sum(shard.bytes for shard in shards))
    for shard in shards[:-1]:
        cache.path(shard)
    read = Path.stat
    taken = []

    def gone_before(path, **how):
        if path.name == names[0] and not taken:
            taken.append(path)
            path.unlink()
        return read(path, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", gone_before)
        cache.path(shards[-1])
    assert taken
    assert sorted(path.name for path in cached(tmp_path)) == sorted(names[1:])


def test_a_damaged_download_is_tried_again_and_then_named(bucket, prepared, tmp_path, monkeypatch):
    upload(bucket, prepared, "set")
    shard = read_manifest(prepared).splits["train"][0]
    body = (prepared / shard.file).read_bytes()
    bad = bytes([body[0] ^ 1]) + body[1:]
    bucket.put_object(Bucket="data", Key=f"set/{shard.file}", Body=bad)
    tries = []
    pause = time.sleep

    def repair_after_two(seconds):
        tries.append(seconds)
        if len(tries) == 2:
            bucket.put_object(Bucket="data", Key=f"set/{shard.file}", Body=body)
        pause(seconds)

    with monkeypatch.context() as patch:
        patch.setattr("training.data.s3.time.sleep", repair_after_two)
        dataset = open_dataset("s3://data/set", cache_dir=tmp_path / "cache")
        assert np.array_equal(dataset[0], open_dataset(prepared)[0])
    assert tries == [0.01, 0.02]
    bucket.put_object(Bucket="data", Key=f"set/{shard.file}", Body=bad)
    fresh = open_dataset("s3://data/set", cache_dir=tmp_path / "fresh")
    with pytest.raises(DataError, match=f"s3://data/set/{shard.file}: sha256 is .* the manifest says"):
        fresh.read(np.array([0]))
    assert not [p for p in (tmp_path / "fresh").rglob("*") if p.suffix in {".part", ".tfrecord", ".h5"}]


def test_what_is_not_there_is_named(bucket, tmp_path):
    with pytest.raises(DataError, match="s3://data/none is not a prepared dataset, or not readable"):
        open_dataset("s3://data/none", cache_dir=tmp_path / "cache")
    with pytest.raises(UsageError, match="there is nothing to read at s3://data/none"):
        prepare(["s3://data/none"], tmp_path / "out", small_settings())
    with pytest.raises(UsageError, match="not of the form s3://bucket/key"):
        prepare(["s3://"], tmp_path / "out", small_settings())


def test_sources_in_the_store_give_the_same_shards_as_files(bucket, tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number:02d}.txt").write_text(make_text(number))
    upload(bucket, folder, "corpus")
    local = prepare([str(folder)], tmp_path / "local", small_settings()).manifest
    remote = prepare(["s3://data/corpus"], tmp_path / "remote", small_settings()).manifest
    assert remote.splits == local.splits
    (folder / "bad.txt").write_bytes(b"text \xff")
    upload(bucket, folder, "corpus")
    with pytest.raises(DataError, match=r"s3://data/corpus/bad\.txt: invalid UTF-8 at offset 5"):
        prepare(["s3://data/corpus"], tmp_path / "bad", small_settings())
