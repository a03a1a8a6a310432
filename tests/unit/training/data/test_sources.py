"""Readers of source files: every kind, cut anywhere, and damage named by file and offset."""

import gzip
import json

import pyarrow
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from training.config.prepare import PrepareSection
from training.data import sources
from training.data.readers import READERS, kind_of
from training.data.sources import plan_parts, read_part
from training.errors import DataError, UsageError

SETTINGS = PrepareSection()


def read_all(source, config=SETTINGS, scratch=None):
    parts = plan_parts([str(source)], config)
    return [document for part in parts for document in read_part(part, config, scratch)]


def texts(source, config=SETTINGS):
    return [document.text for document in read_all(source, config)]


def json_lines(records):
    return "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(records)).encode()


RECORDS = ["first", "second with ünïcode", "", "last \u2028 one"]


@pytest.mark.parametrize("ending", ["jsonl", "ndjson", "jsonl.gz", "jsonl.zst"])
def test_json_lines_plain_and_compressed(tmp_path, ending):
    pack = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress}.get(ending[-3:].strip("."), bytes)
    (tmp_path / f"a.{ending}").write_bytes(pack(json_lines(RECORDS)))
    assert texts(tmp_path / f"a.{ending}") == RECORDS


@pytest.mark.parametrize("ending", ["txt", "md", "rst", "txt.gz", "txt.zst"])
def test_a_text_file_is_one_document(tmp_path, ending):
    pack = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress}.get(ending[-3:].strip("."), bytes)
    (tmp_path / f"a.{ending}").write_bytes(pack("one\ntwo ü\n".encode()))
    [document] = read_all(tmp_path / f"a.{ending}")
    assert document.text == "one\ntwo ü\n" and document.origin == f"{tmp_path}/a.{ending}:0"


def test_parquet_row_groups(tmp_path):
    table = pyarrow.table({"text": [f"row {i}" for i in range(10)], "other": list(range(10))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    assert texts(tmp_path / "a.parquet") == [f"row {i}" for i in range(10)]
    with pytest.raises(DataError, match=r"no column 'body' \(columns: text, other\)"):
        read_all(tmp_path / "a.parquet", PrepareSection(text_field="body"))


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    for name in ("b/2.txt", "a/1.txt", "c.jsonl", "picture.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}) if name.endswith("jsonl") else name)
    assert texts(tmp_path) == ["a/1.txt", "b/2.txt", "c.jsonl"]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records=st.lists(st.text(max_size=30), max_size=12), limit=st.integers(1, 80))
def test_a_file_cut_anywhere_gives_every_line_once(tmp_path, records, limit):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines(records))
    size = path.stat().st_size
    pieces = [(start, min(start + limit, size)) for start in range(0, size, limit)]
    found = [text for start, stop in pieces for text, _ in READERS["jsonl"](path, start, stop, SETTINGS)]
    assert found == records


def test_long_text_is_cut_at_line_ends(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {i:03d}\n" for i in range(100)))
    found = read_all(tmp_path / "a.txt", PrepareSection(max_document_bytes=50))
    assert "".join(document.text for document in found) == (tmp_path / "a.txt").read_text()
    assert all(len(document.text) <= 50 and document.text.startswith("line") for document in found)
    assert found[1].origin == f"{tmp_path}/a.txt:{len(found[0].text)}"


def test_parts_do_not_depend_on_workers_and_are_bounded(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(["x" * 1000] * 5000))
    parts = plan_parts([str(tmp_path)], PrepareSection(workers=1))
    assert parts == plan_parts([str(tmp_path)], PrepareSection(workers=7))
    assert len(parts) == 6 and all(part.bytes <= 1_000_000 for part in parts)


def damaged(tmp_path, name, data, message, **config):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        read_all(tmp_path / name, PrepareSection(**config))
    assert name in caught.value.cause and caught.value.remedy


def test_damage_is_named_by_file_and_offset(tmp_path):
    good = json_lines(["good"])
    at = len(good)
    damaged(tmp_path, "a.txt", b"fine\nbad \xff here", "invalid UTF-8 at offset 9")
    damaged(tmp_path, "a.jsonl", good + b'{"text": "\xff"}\n', rf"invalid UTF-8 at offset {at + 10}")
    damaged(tmp_path, "b.jsonl", good + b'{"text": \n', rf"line at offset {at} is not valid JSON")
    damaged(tmp_path, "c.jsonl", good + b'{"body": "x"}\n', rf"offset {at} has no text in field 'text' \(found: body\)")
    damaged(tmp_path, "d.jsonl", good + b"[1, 2]\n", rf"offset {at} has no text in field 'text' \(found: list\)")
    damaged(tmp_path, "e.jsonl", good + b"[" * 100_000 + b"\n", "nested too deeply|not valid JSON")
    damaged(tmp_path, "f.txt.gz", gzip.compress(b"text" * 999)[:-20], "cannot be read")
    damaged(tmp_path, "g.txt.gz", b"no gzip at all", "cannot be read")
    damaged(tmp_path, "h.txt.zst", b"no zstd at all", "compressed stream is damaged")
    damaged(tmp_path, "i.parquet", b"PAR1 no parquet", "not a readable Parquet file")


def test_a_cut_zstd_stream_is_no_complete_one(tmp_path):
    packed = zstandard.ZstdCompressor().compress(bytes(range(256)) * 4000)
    damaged(tmp_path, "a.txt.zst", packed[: len(packed) // 2], "compressed stream is cut off", invalid_utf8="replace")


def test_zstd_frames_that_follow_each_other_are_one_stream(tmp_path):
    pack = zstandard.ZstdCompressor().compress
    (tmp_path / "a.txt.zst").write_bytes(pack(b"one\n" * 90_000) + pack(b"two\n"))
    assert texts(tmp_path / "a.txt.zst") == ["one\n" * 90_000 + "two\n"]


def test_bytes_that_are_no_utf8_can_be_replaced(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"bad \xff here")
    assert texts(tmp_path / "a.txt", PrepareSection(invalid_utf8="replace")) == ["bad \ufffd here"]


def test_half_a_surrogate_pair_becomes_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "half \\ud83d pair"}\n')
    [text] = texts(tmp_path / "a.jsonl")
    assert text.encode() == b"half ? pair"


def test_a_line_without_end_is_refused_without_reading_it_all(tmp_path):
    path = tmp_path / "a.jsonl"
    with path.open("wb") as stream:
        stream.write(b'{"text": "ok"}\n')
        stream.truncate(1_000_000_000)  # a sparse gigabyte of zeros: one line
    with pytest.raises(DataError, match=r"a\.jsonl: the line at offset 15 is longer than 16000000 bytes"):
        read_all(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [("absent", "does not exist"), ("empty", "contains no file to read"), ("a.docx", "is of no known kind")],
)
def test_a_source_that_cannot_be_used_is_refused(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.docx").write_text("x")
    with pytest.raises(UsageError, match=message):
        plan_parts([str(tmp_path / name)], SETTINGS)


def test_a_source_that_vanishes_or_changes_is_named(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("text")
    [part] = plan_parts([str(path)], SETTINGS)
    path.write_text("other text")
    with pytest.raises(DataError, match=r"a\.txt: the source has changed since preparation began \(4 bytes, now 10\)"):
        list(read_part(part, SETTINGS, tmp_path))
    path.unlink()
    with pytest.raises(DataError, match=r"a\.txt: the source has gone"):
        list(read_part(part, SETTINGS, tmp_path))


def test_kinds_go_by_the_ending():
    from pathlib import PurePath

    known = {"a.TXT": "text", "a.jsonl.gz": "jsonl.gz", "a.parquet": "parquet", "a.gz": None, "a.py": None, "a": None}
    assert {name: kind_of(PurePath(name)) for name in known} == known


def test_the_demo_source_is_the_interpreters_own_library():
    parts = plan_parts([sources.DEMO_SOURCE], SETTINGS)
    assert sum(part.bytes for part in parts) > 9_000_000
    topics = next(span for part in parts for span in part.spans if span.path.endswith("pydoc_data/topics.py"))
    help_texts = [text for text, _ in READERS["python"](__import__("pathlib").Path(topics.path), 0, 0, SETTINGS)]
    assert len(help_texts) > 50 and any("assert" in text for text in help_texts)
