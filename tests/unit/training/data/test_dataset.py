"""Manifest and dataset: counts, hashes, order over shards, mixtures, and a hundred thousand shards."""

import json
import pickle
import shutil
import subprocess
import sys

import numpy as np
import pytest
from data_samples import make_text, small_settings
from hypothesis import given, settings
from hypothesis import strategies as st

from training.config.schema import DataSection
from training.data import Mixture, open_data, open_dataset, read_manifest
from training.data.manifest import Manifest, ShardEntry, write_manifest
from training.data.order import samples, windowed_samples
from training.data.prepare import prepare
from training.errors import DataError


def test_sequences_by_number_by_list_and_by_block_agree(prepared):
    dataset = open_dataset(prepared)
    assert len(read_manifest(prepared).splits["train"]) > 2
    rows = np.concatenate(list(dataset.blocks(7)))
    assert rows.shape == (len(dataset), 17) and dataset.sequence_length == 16
    order = np.random.default_rng(0).permutation(len(dataset))
    assert np.array_equal(dataset.read(order), rows[order])
    assert np.array_equal(dataset[3], rows[3]) and np.array_equal(dataset[-1], rows[-1])
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_few_shards_are_open_at_a_time(prepared):
    dataset = open_dataset(prepared)
    dataset._max_open = 2
    rows = np.concatenate(list(dataset.blocks()))
    assert len(dataset._open) == 2
    assert np.array_equal(dataset[0], rows[0])
    dataset.close()
    assert not dataset._open


def test_a_dataset_goes_to_another_process_with_its_shards_closed(prepared):
    dataset = open_dataset(prepared)
    first = dataset[0]
    copy = pickle.loads(pickle.dumps(dataset))
    assert not copy._open and np.array_equal(copy[0], first)


def test_a_manifest_comes_back_as_it_was_written(tmp_path):
    shards = [ShardEntry("train/a.tfrecord", 3, 51, 200, "0" * 64), ShardEntry("train/b.tfrecord", 1, 17, 70, "1" * 64)]
    manifest = Manifest("tfrecord", 16, "uint16", 300, "2" * 64, {"train": shards}, {"begin": 0}, prepare={"x": [1]})
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert read_manifest(tmp_path).sequences("train") == 4 and manifest.tokens("train") == 68


def change(prepared, tmp_path, edit):
    copy = tmp_path / "copy"
    shutil.copytree(prepared, copy)
    data = json.loads((copy / "manifest.json").read_text())
    edit(data, data["splits"]["train"]["shards"])
    (copy / "manifest.json").write_text(json.dumps(data))
    return copy


EDITS = {
    "schema version 2": lambda m, s: m.update(schema_version=2),
    "field 'sequence_length'": lambda m, s: m.update(sequence_length="16"),
    "field 'tokenizer'": lambda m, s: m.pop("tokenizer"),
    "no list of shards": lambda m, s: m["splits"].update(train=[]),
    "token_dtype is 'float32'": lambda m, s: m.update(token_dtype="float32"),
    "missing or wrong field": lambda m, s: s[1].pop("sha256"),
    "wrong type or value": lambda m, s: s[0].update(sequences=-1),
    "shard 1 .*wrong type": lambda m, s: s[1].update(file="../../etc/passwd"),
    "its shards add up to": lambda m, s: s[0].update(sequences=s[0]["sequences"] + 1),
    "must be positive": lambda m, s: m.update(vocab_size=0),
}


@pytest.mark.parametrize("message", EDITS)
def test_a_manifest_that_cannot_be_right_is_refused(prepared, tmp_path, message):
    copy = change(prepared, tmp_path, EDITS[message])
    with pytest.raises(DataError, match=message) as caught:
        open_dataset(copy)
    assert "manifest.json" in caught.value.cause and caught.value.remedy


def test_a_manifest_that_lies_about_counts_is_found_when_the_shard_is_read(prepared, tmp_path):
    def lie(manifest, shards):
        shards[0]["sequences"] += 1
        shards[1]["sequences"] -= 1

    dataset = open_dataset(change(prepared, tmp_path, lie))
    with pytest.raises(DataError, match=r"holds \d+ sequences, the manifest says \d+"):
        dataset[0]


def test_no_manifest_no_split_and_a_strange_format_are_named(prepared, tmp_path):
    with pytest.raises(DataError, match="is not a prepared dataset"):
        open_dataset(tmp_path)
    with pytest.raises(DataError, match="no sequence in split 'test'"):
        open_dataset(prepared, "test")
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        open_dataset(tmp_path)


def test_the_wrong_tokenizer_is_refused(prepared, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(prepared, copy)
    (copy / "tokenizer.json").write_text((copy / "tokenizer.json").read_text() + " ")
    with pytest.raises(DataError, match="is not the tokenizer of these shards"):
        open_dataset(copy)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="tokenizer .* cannot be read"):
        open_dataset(copy)


HUNDRED_THOUSAND_SHARDS = """
import sys, time
import numpy as np
from training.data import open_dataset
started = time.perf_counter()
dataset = open_dataset(sys.argv[1])
opened = time.perf_counter() - started
started = time.perf_counter()
first = dataset.order(42, 7, np.arange(64))
began = time.perf_counter() - started
memory = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(opened, began, memory, len(dataset), len(set(first.tolist())))
"""


def test_a_hundred_thousand_shards_open_in_seconds_and_little_memory(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    digest = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    sequences = 10**9 // 8194  # a gigabyte a shard: a hundred terabytes, of which only the manifest exists
    shards = [
        ShardEntry(f"train/{i:06d}-000.tfrecord", sequences, sequences * 4097, 10**9, f"{i:064x}")
        for i in range(100_000)
    ]
    write_manifest(tmp_path, Manifest("tfrecord", 4096, "uint16", 65536, digest, {"train": shards}))
    done = subprocess.run(
        [sys.executable, "-c", HUNDRED_THOUSAND_SHARDS, str(tmp_path)], capture_output=True, text=True, check=True
    )
    opened_s, began_s, memory_kb, length, different = map(float, done.stdout.split())
    assert length == 100_000 * sequences and different == 64
    assert opened_s < 5 and memory_kb < 300_000
    assert began_s < 0.1  # twelve billion sequences: nothing is listed or shuffled


@settings(deadline=None)
@given(n=st.integers(1, 200), block=st.integers(1, 20), windows=st.integers(1, 6), epoch=st.integers(0, 5))
def test_a_windowed_epoch_is_a_permutation_within_few_blocks(n, block, windows, epoch):
    order = windowed_samples(7, epoch, np.arange(n), n, block=block, window_blocks=windows)
    assert sorted(order.tolist()) == list(range(n))
    size = block * windows
    for start in range(0, n // size * size, size):
        blocks = {int(i) // block for i in order[start : start + size]}
        assert len(blocks) <= windows
    scattered = np.array([n - 1, 0])
    assert (
        windowed_samples(7, epoch, scattered, n, block=block, window_blocks=windows).tolist()
        == order[scattered].tolist()
    )


def test_a_window_leaves_the_order_a_permutation_of_the_dataset(prepared):
    dataset = open_dataset(prepared, shuffle_window_bytes=4000)
    positions = np.arange(len(dataset))
    order = dataset.order(1, 0, positions)
    assert sorted(order.tolist()) == positions.tolist()
    assert not np.array_equal(order, samples(1, 0, positions, len(dataset)))


class Part:
    """A dataset of a mixture, without files."""

    def __init__(self, n, first=0):
        self.n, self.first, self.folder = n, first, f"part of {n}"
        self.sequence_length, self.pad_token_id = 1, None
        self.manifest = type("M", (), {"tokenizer_sha256": "x"})

    def __len__(self):
        return self.n

    def read(self, indices):
        return np.repeat(indices[:, None] + self.first, 2, axis=1)


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    weights=st.lists(st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0]), min_size=4, max_size=4),
    seed=st.integers(0, 99),
)
def test_a_mixture_reads_each_part_by_its_weight_and_evenly(sizes, weights, seed):
    parts = [Part(n, 1000 * number) for number, n in enumerate(sizes)]
    shares = [round(weight * n) for weight, n in zip(weights, sizes, strict=False)]
    if not sum(shares):
        return
    mixture = Mixture(list(zip(parts, weights, strict=False)))
    assert len(mixture) == sum(shares)
    read = []
    for epoch in range(5):
        numbers = mixture.read(mixture.order(seed, epoch, np.arange(len(mixture))))[:, 0]
        for number, share in enumerate(shares):
            assert int(((numbers // 1000) == number).sum()) == share
        read += numbers.tolist()
        # None before all others of its part have had their turn: counts differ by one at most.
        for number, n in enumerate(sizes):
            counts = np.bincount([i % 1000 for i in read if i // 1000 == number], minlength=n)
            assert counts.max() - counts.min() <= 1
    some = np.array([len(mixture) - 1, 0])
    assert mixture.order(seed, 3, some).tolist() == mixture.order(seed, 3, np.arange(len(mixture)))[some].tolist()


def test_a_mixture_of_two_prepared_datasets(prepared, tmp_path):
    (tmp_path / "corpus").mkdir()
    for number in range(50):
        (tmp_path / "corpus" / f"{number}.txt").write_text(make_text(1000 + number))
    tokenizer = str(prepared / "tokenizer.json")
    prepare([str(tmp_path / "corpus")], tmp_path / "more", small_settings(tokenizer=tokenizer))
    section = DataSection(mixture={str(prepared): 1.0, str(tmp_path / "more"): 2.0})
    mixture = open_data(section)
    one, two = open_dataset(prepared), open_dataset(tmp_path / "more")
    assert len(mixture) == len(one) + 2 * len(two)
    rows = mixture.read(mixture.order(1, 0, np.arange(len(mixture))))
    expected = np.concatenate([*one.blocks(), *two.blocks(), *two.blocks()])
    assert sorted(rows.tolist()) == sorted(expected.tolist())
    mixture.close()
    assert isinstance(open_data(DataSection(path=str(prepared))), type(one))


def test_datasets_that_do_not_go_together_are_refused(prepared, tmp_path, corpus):
    prepare([str(corpus)], tmp_path / "other", small_settings(sequence_length=8))
    section = DataSection(mixture={str(prepared): 1.0, str(tmp_path / "other"): 1.0})
    with pytest.raises(DataError, match="do not go together: sequence length 16 and 8"):
        open_data(section)
    with pytest.raises(DataError, match="the mixture names no dataset"):
        Mixture([])
