"""Host copies and hashed files."""

from __future__ import annotations

import errno
import hashlib
import random
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from training.checkpoint import snapshot
from training.checkpoint.hashing import HashingFile
from training.checkpoint.layout import hash_file
from training.checkpoint.snapshot import HostCopier, write_all, write_object
from training.checkpoint.state import SavedProgress, read_progress, restore_rng_state, rng_state


def test_a_copy_is_independent_of_its_source():
    source = {"a": torch.ones(3), "list": [torch.zeros(2), 5], "nested": OrderedDict(x=(torch.ones(1), "text"))}
    copied = HostCopier().copy("k", source)
    source["a"].add_(1)
    source["list"][0].add_(1)
    source["nested"]["x"][0].add_(1)
    source["list"].append("new")
    assert copied["a"].tolist() == [1, 1, 1]
    assert copied["list"][0].tolist() == [0, 0]
    assert len(copied["list"]) == 2
    assert copied["nested"]["x"] == (torch.ones(1), "text")
    assert type(copied["nested"]) is OrderedDict


def test_views_are_copied_alone_and_shared_tensors_once(tmp_path):
    base = torch.arange(100_000, dtype=torch.float32)
    copied = HostCopier().copy("k", {"view": base[:10], "tied": base, "again": base})
    assert copied["view"].untyped_storage().nbytes() == 40
    assert copied["tied"] is copied["again"]
    write_object(tmp_path / "x.pt", {"view": copied["view"]})
    assert (tmp_path / "x.pt").stat().st_size < 3000


def test_buffers_are_used_again():
    copier = HostCopier()
    first = copier.copy("k", {"a": torch.ones(4)})["a"]
    second = copier.copy("k", {"a": torch.zeros(4)})["a"]
    assert first.data_ptr() == second.data_ptr()
    assert copier.copy("other", {"a": torch.ones(4)})["a"].data_ptr() != second.data_ptr()
    assert copier.copy("k", {"a": torch.ones(5)})["a"].tolist() == [1] * 5


def test_parameters_and_non_contiguous_tensors():
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    copied = HostCopier().copy("k", [weight, weight.t()])
    assert copied[1].tolist() == weight.t().tolist()
    assert not copied[0].requires_grad


def test_hash_and_size_are_those_of_the_file(tmp_path):
    entry = write_object(tmp_path / "deep" / "x.pt", {"t": torch.randn(1000), "n": 3})
    assert entry == hash_file(tmp_path / "deep" / "x.pt")
    assert torch.load(tmp_path / "deep" / "x.pt", weights_only=True)["n"] == 3
    entries = write_all(tmp_path, {"a.json": b"{}", "b.pt": [1]})
    assert entries["a.json"].sha256 == hashlib.sha256(b"{}").hexdigest()
    assert entries["b.pt"] == hash_file(tmp_path / "b.pt")


def test_a_full_disk_is_reported_as_what_it_is(tmp_path, monkeypatch):
    def full(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(HashingFile, "write", full)
    with pytest.raises(OSError) as caught:
        write_object(tmp_path / "x.pt", {"t": torch.randn(10)})
    assert caught.value.errno == errno.ENOSPC


def test_random_state_is_restored_in_all_three_generators(tmp_path):
    snapshot.write_object(tmp_path / "rng.pt", rng_state())

    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    expected = draw()
    assert draw() != expected
    restore_rng_state(tmp_path / "rng.pt")
    assert draw() == expected


def test_progress_round_trip(tmp_path: Path):
    progress = SavedProgress(120, 2, 64, {"tokens": 1000.0}, ((10, 20),))
    (tmp_path / "state.json").write_bytes(progress.to_bytes(parameter_names=[["a"]]))
    assert read_progress(tmp_path) == (progress, {"parameter_names": [["a"]]})
