"""Small datasets for the tests of this room."""

import pytest
from data_samples import make_text, small_settings

from training.data.prepare import prepare


@pytest.fixture
def corpus(tmp_path):
    """A folder of 60 text files."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:03d}.txt").write_text(make_text(number))
    return folder


@pytest.fixture(scope="session", params=["tfrecord", "hdf5"])
def prepared(request, tmp_path_factory):
    """A finished dataset of several shards, in each format. Tests that change it copy it."""
    root = tmp_path_factory.mktemp(f"prepared-{request.param}")
    (root / "corpus").mkdir()
    for number in range(80):
        (root / "corpus" / f"{number:03d}.txt").write_text(make_text(number))
    out = root / "dataset"
    prepare([str(root / "corpus")], out, small_settings(format=request.param, shard_bytes=2000))
    return out
