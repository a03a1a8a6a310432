"""Preparation from end to end on a small corpus: repeatable, restartable, and honest about what it dropped."""

import json
import os
import shutil

import numpy as np
import pytest
from data_samples import make_text, small_settings
from tokenizers import Tokenizer

from training.data import open_dataset
from training.data.prepare import prepare
from training.errors import DataError, StorageError, UsageError


def files_of(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def decoded(out, split="train"):
    dataset = open_dataset(out, split)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    stream = np.concatenate([block.ravel() for block in dataset.blocks()])
    return tokenizer.decode(stream.tolist(), skip_special_tokens=False)


def test_the_text_comes_back_document_by_document(corpus, tmp_path):
    prepared = prepare([str(corpus)], tmp_path / "out", small_settings())
    text = decoded(tmp_path / "out")
    documents = text.split("<|begin_text|>")[1:]
    originals = {make_text(number) for number in range(60)}
    assert len(documents) > 40
    assert all(document in originals for document in documents[:-1])
    report = prepared.report.content
    assert report["documents_in"] == report["documents_out"] == 60
    assert report["validation_documents"] + len(documents) == 60
    held_out = decoded(tmp_path / "out", "validation").split("<|begin_text|>")[1:]
    assert held_out and not set(held_out) & set(documents)


class _Stopped(Exception):
    pass


@pytest.mark.parametrize("form", ["tfrecord", "hdf5"])
def test_stopped_at_any_file_and_run_again_gives_the_same_bytes(corpus, tmp_path, monkeypatch, form):
    monkeypatch.setattr("training.data.sources.MIN_PART_BYTES", 5000)
    settings = small_settings(format=form)
    prepare([str(corpus)], tmp_path / "undisturbed", settings)
    expected = files_of(tmp_path / "undisturbed")
    out, sync, synced, allowed = tmp_path / "out", os.fsync, 0, 0

    def stopping(descriptor):  # every file is synced before it takes its name
        nonlocal synced
        synced += 1
        if synced > allowed:
            raise _Stopped
        sync(descriptor)

    monkeypatch.setattr("os.fsync", stopping)
    for attempt in range(100):
        synced, allowed = 0, 1 + attempt % 9
        try:
            prepare([str(corpus)], out, settings)
            break
        except _Stopped:
            assert not (out / "manifest.json").exists()
    assert attempt > 4
    assert files_of(out) == expected


def test_finished_shards_are_kept(corpus, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def stop(*_):
        raise _Stopped

    with monkeypatch.context() as patch:
        patch.setattr("training.data.prepare.write_manifest", stop)
        with pytest.raises(_Stopped):
            prepare([str(corpus)], out, small_settings())
    shards = {path: path.stat().st_mtime_ns for path in (out / "train").iterdir()}
    prepare([str(corpus)], out, small_settings())
    assert shards and shards == {path: path.stat().st_mtime_ns for path in (out / "train").iterdir()}


def test_running_again_changes_nothing_and_other_settings_are_refused(corpus, tmp_path):
    out = tmp_path / "out"
    assert prepare([str(corpus)], out, small_settings()).report is not None
    before = files_of(out)
    assert prepare([str(corpus)], out, small_settings(workers=2)).report is None
    assert files_of(out) == before
    with pytest.raises(UsageError, match="other input or with other settings"):
        prepare([str(corpus)], out, small_settings(sequence_length=8))
    (corpus / "new.txt").write_text("new")
    with pytest.raises(UsageError, match="other input"):
        prepare([str(corpus)], out, small_settings())


def test_work_of_other_settings_is_not_gone_on_with(corpus, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("training.data.prepare.write_manifest", lambda *_: (_ for _ in ()).throw(_Stopped))
        with pytest.raises(_Stopped):
            prepare([str(corpus)], out, small_settings(sequence_length=8, shard_bytes=500))
    prepare([str(corpus)], out, small_settings())
    prepare([str(corpus)], tmp_path / "clean", small_settings())
    assert files_of(out) == files_of(tmp_path / "clean")


def test_duplicates_are_dropped_and_reported_with_examples(corpus, tmp_path):
    (corpus / "copy.txt").write_text(make_text(3).upper())
    (corpus / "near.txt").write_text(make_text(4, 400))
    (corpus / "nearly.txt").write_text(make_text(4, 400).replace("harbour", "port", 1))
    report = prepare([str(corpus)], tmp_path / "out", small_settings()).report.content
    assert {rule: entry["documents"] for rule, entry in report["dropped"].items()} == {
        "exact_duplicate": 1,
        "near_duplicate": 1,
    }
    assert report["dropped"]["exact_duplicate"]["examples"][0]["origin"].endswith("copy.txt:0")
    assert report["documents_in"] - report["documents_out"] == 2
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report
    assert "| dropped: near_duplicate | 1 |" in (tmp_path / "out" / "report.md").read_text()


def test_quality_rules_show_in_the_report(corpus, tmp_path):
    (corpus / "short.txt").write_text("too short")
    settings = small_settings(quality={"min_stop_words": 0})
    report = prepare([str(corpus)], tmp_path / "out", settings).report.content
    assert report["dropped"]["min_doc_words"]["examples"] == [{"origin": f"{corpus}/short.txt:0", "text": "too short"}]
    assert report["bytes_in"] - report["bytes_out"] == len("too short")


def test_best_fit_pads_and_counts_real_tokens(corpus, tmp_path):
    manifest = prepare([str(corpus)], tmp_path / "out", small_settings(packing="best_fit", sequence_length=90)).manifest
    dataset = open_dataset(tmp_path / "out")
    rows = np.concatenate(list(dataset.blocks()))
    assert (rows == dataset.pad_token_id).any()
    assert manifest.tokens("train") == int((rows != dataset.pad_token_id).sum())
    assert manifest.prepare["settings"]["packing"] == "best_fit"


def test_a_tokenizer_can_be_given(corpus, tmp_path):
    prepare([str(corpus)], tmp_path / "first", small_settings())
    given = tmp_path / "first" / "tokenizer.json"
    prepare([str(corpus)], tmp_path / "second", small_settings(tokenizer=str(given)))
    assert (tmp_path / "second" / "tokenizer.json").read_bytes() == given.read_bytes()
    with pytest.raises(UsageError, match="no token '<s>'"):
        prepare([str(corpus)], tmp_path / "third", small_settings(tokenizer=str(given), begin_token="<s>"))
    (tmp_path / "broken.json").write_text("{}")
    for name, message in (("broken.json", "is not a tokenizer.json"), ("absent.json", "there is no tokenizer")):
        with pytest.raises(UsageError, match=message):
            prepare([str(corpus)], tmp_path / "fourth", small_settings(tokenizer=str(tmp_path / name)))


def test_spelled_special_tokens_and_digits_are_text(corpus, tmp_path):
    (corpus / "tricky.txt").write_text("<|begin_text|> is spelled 2026 " * 20)
    prepare([str(corpus)], tmp_path / "out", small_settings(validation_fraction=0.0))
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    begin = tokenizer.token_to_id("<|begin_text|>")
    rows = np.concatenate([b.ravel() for b in open_dataset(tmp_path / "out").blocks()])
    assert int((rows == begin).sum()) <= 61  # one a document, none from the spelling
    assert tokenizer.encode("2026").tokens == ["2", "0", "2", "6"]
    assert (
        tokenizer.decode(tokenizer.encode("日本 \U0001f600").ids) == "日本 \U0001f600"
    )  # bytes stand in for the unseen


def test_too_little_text_is_an_error_and_leaves_no_manifest(tmp_path):
    (tmp_path / "a.txt").write_text("one two three")
    with pytest.raises(DataError, match="not give a single training sequence"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "out", small_settings())
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_full_disk_is_an_error_that_says_so(corpus, tmp_path, monkeypatch):
    import errno

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match="no space left while writing"):
        prepare([str(corpus)], tmp_path / "out", small_settings())
    assert not list((tmp_path / "out").rglob("*.tmp"))
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_shard_lost_between_two_runs_is_made_again(corpus, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("training.data.prepare.write_manifest", lambda *_: (_ for _ in ()).throw(_Stopped))
        with pytest.raises(_Stopped):
            prepare([str(corpus)], out, small_settings())
    shutil.rmtree(out / "train")
    prepare([str(corpus)], out, small_settings())
    assert len(open_dataset(out)) > 10


def test_another_tokenizer_under_the_same_name_is_noticed(corpus, tmp_path):
    first = prepare([str(corpus)], tmp_path / "out", small_settings(vocab_size=300)).manifest
    shutil.rmtree(tmp_path / "out")
    second = prepare([str(corpus)], tmp_path / "out", small_settings(vocab_size=350)).manifest
    assert (first.vocab_size, second.vocab_size) == (300, 350)
    assert max(int(block.max()) for block in open_dataset(tmp_path / "out").blocks()) >= 300
