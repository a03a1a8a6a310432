"""verify, inspect and the command line: every fault is named, exit codes are what scripts rely on."""

import fcntl
import json
import shutil

import numpy as np
import pytest
from data_samples import SMALL
from rich.console import Console

from training.data import open_dataset
from training.data.__main__ import main
from training.data.inspection import print_dataset, statistics
from training.data.manifest import read_manifest
from training.data.verify import verify_dataset
from training.errors import UsageError


@pytest.fixture
def copy(prepared, tmp_path):
    shutil.copytree(prepared, tmp_path / "copy")
    return tmp_path / "copy"


def shard(folder, number=0):
    return folder / read_manifest(folder).splits["train"][number].file


def faults(folder):
    return verify_dataset(folder, workers=1).faults


def test_a_sound_dataset_has_no_fault(prepared):
    result = verify_dataset(prepared, workers=1)
    manifest = read_manifest(prepared)
    assert result.faults == ()
    assert result.shards == sum(map(len, manifest.splits.values()))
    assert result.sequences == manifest.sequences("train") + manifest.sequences("validation")
    assert main(["verify", str(prepared), "--workers", "1"]) == 0


def test_each_bad_shard_and_record_is_named(copy, capsys):
    manifest = read_manifest(copy)
    first, second, third = (shard(copy, number) for number in range(3))
    data = bytearray(first.read_bytes())
    rows = open_dataset(copy).read(np.arange(manifest.splits["train"][0].sequences))
    for record in (1, 4):
        data[data.find(rows[record].tobytes()) + 3] ^= 1
    first.write_bytes(bytes(data))
    second.unlink()
    third.write_bytes(b"")
    (copy / "tokenizer.json").write_text("{}")
    found = faults(copy)
    assert any(f"{first}: sha256 is" in fault for fault in found)
    if manifest.format == "tfrecord":  # an HDF5 chunk holds several short sequences
        named = [fault for fault in found if f"{first}: record" in fault]
        assert len(named) == 2 and "record 1 at offset" in named[0] and "record 4 at offset" in named[1]
    assert any(f"{first}: record 1 at offset" in fault for fault in found)
    assert any(f"{second}: cannot be read" in fault for fault in found)
    assert any(f"{third}: the shard is empty" in fault for fault in found)
    assert any("is not the tokenizer of these shards" in fault for fault in found)
    assert main(["verify", str(copy), "--workers", "1"]) == 1
    assert f"{len(found)} faults" in capsys.readouterr().out


def test_counts_and_vocabulary_are_checked(copy):
    data = json.loads((copy / "manifest.json").read_text())
    entries = data["splits"]["train"]["shards"]
    entries[0]["sequences"] += 1
    entries[1]["sequences"] -= 1
    entries[2]["tokens"] += 5
    data["vocab_size"] = 100
    (copy / "manifest.json").write_text(json.dumps(data))
    found = "\n".join(faults(copy))
    assert f"{shard(copy, 0)}: {entries[0]['sequences'] - 1} sequences, the manifest says" in found
    assert f"{shard(copy, 1)}: {entries[1]['sequences'] + 1} sequences, the manifest says" in found
    assert f"tokens, the manifest says {entries[2]['tokens']}" in found
    assert "has a token outside the vocabulary of 100" in found


def test_more_faults_than_are_worth_reading_are_counted(copy):
    path = shard(copy)
    if path.suffix != ".tfrecord":  # the records of an HDF5 chunk share their fate
        return
    size = read_manifest(copy).splits["train"][0].sequences
    data = bytearray(path.read_bytes())
    stride = len(data) // size
    for record in range(size):
        data[record * stride + stride - 1] ^= 1
    path.write_bytes(bytes(data))
    assert any(fault.endswith(f"{size - 20} more records are damaged") for fault in faults(copy))


def test_inspect_shows_text_and_statistics(prepared, capsys):
    assert main(["inspect", str(prepared)]) == 0
    shown = capsys.readouterr().out
    for word in ("train", "validation", "sequences of 16 + 1 tokens", "most frequent tokens", "<|begin_text|>"):
        assert word in shown
    assert main(["inspect", str(prepared), "--index", "0", "--split", "validation"]) == 0
    assert "validation 0" in capsys.readouterr().out
    assert main(["inspect", str(prepared), "--index", "99999"]) == 2
    assert "choose one from 0 to" in capsys.readouterr().err


def test_statistics_count_every_token_once(prepared):
    dataset = open_dataset(prepared)
    found = statistics(dataset, sequences=10**6)
    rows = np.concatenate(list(dataset.blocks()))
    assert found.sequences == len(dataset)
    values, counts = np.unique(rows, return_counts=True)
    best = values[np.argmax(counts)]
    assert found.top_tokens[0] == (int(best), pytest.approx(counts.max() / rows.size))
    assert sum(n for _, n in found.length_histogram) >= len(dataset)
    with pytest.raises(UsageError, match="no sequence -1"):
        print_dataset(prepared, Console(), -1)


def prepare_arguments(out, *more):
    sets = [f"--set=prepare.{key}={json.dumps(value)}" for key, value in SMALL.items()]
    return ["prepare", "--out", str(out), *sets, *more]


def test_prepare_from_the_command_line(corpus, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = prepare_arguments(out, "--source", str(corpus), "--format", "hdf5", "--seq-len", "8", "--workers", "1")
    assert main(arguments) == 0
    assert "kept" in capsys.readouterr().out
    manifest = read_manifest(out)
    assert (manifest.format, manifest.sequence_length) == ("hdf5", 8)
    assert main(arguments) == 0
    assert "already prepared" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        ((), 2, "give either --source PATH... or --demo"),
        (("--demo", "--source", "x"), 2, "give either"),
        (("--source", "absent"), 2, "the source absent does not exist"),
        (("--source", "absent", "--set", "prepare.packing=none"), 2, "prepare.packing"),
        (("--source", "absent", "--set", "training.max_steps=1"), 2, "only keys of the prepare section"),
        (("--source", "absent", "--set", "prepare.quality.min_words=1"), 2, "prepare.quality.min_words"),
    ],
)
def test_wrong_use_is_explained(tmp_path, capsys, more, code, message):
    assert main(prepare_arguments(tmp_path / "out", *more)) == code
    error = capsys.readouterr().err
    assert message in error and "next:" in error and "Traceback" not in error


def test_damaged_input_ends_with_1(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(b"\xff")
    assert main(prepare_arguments(tmp_path / "out", "--source", str(tmp_path / "a.txt"))) == 1
    assert "a.txt: invalid UTF-8 at offset 0" in capsys.readouterr().err
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_two_preparations_do_not_write_to_one_folder(corpus, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    with (out / ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert main(prepare_arguments(out, "--source", str(corpus))) == 2
    assert "another preparation is writing" in capsys.readouterr().err
    (out / ".manifest.json.99.tmp").write_text("left by a killed run")
    assert main(prepare_arguments(out, "--source", str(corpus))) == 0
    assert {path.name for path in out.iterdir()} == {
        "manifest.json",
        "report.json",
        "report.md",
        "tokenizer.json",
        "train",
        "validation",
    }
