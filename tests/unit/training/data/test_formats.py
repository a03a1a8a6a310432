"""Shard formats: what is written comes back, other programs read it, damage is named by file and offset."""

import contextlib
import struct
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from training.data.example import ExampleError, decode_varints, example_prefix, parse_tokens, varint
from training.data.files import sha256_of
from training.data.formats import ShardLayout, format_names, get_format
from training.data.formats.tfrecord import masked_crc32c
from training.errors import DataError, UsageError

LAYOUT = ShardLayout(9, "uint16")
FORMATS = ["tfrecord", "hdf5"]


def numbers(count, tokens=9, dtype="uint16"):
    rng = np.random.default_rng(count)
    return rng.integers(0, np.iinfo(dtype).max + 1, (count, tokens), dtype=dtype)


def write(path, rows, name="tfrecord", layout=LAYOUT, **options):
    writer = get_format(name).open_writer(path, layout, options)
    for start in range(0, len(rows), 7):
        writer.append(rows[start : start + 7])
    return writer.close()


def reader(path, name="tfrecord", layout=LAYOUT):
    return get_format(name).open_reader(path, layout, True)


def test_both_formats_are_found_by_name():
    assert format_names() == ["hdf5", "tfrecord"]
    with pytest.raises(UsageError, match="no shard format 'csv'"):
        get_format("csv")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("tokens", "dtype"), [(9, "uint16"), (2, "uint32"), (4097, "uint16")])
def test_rows_come_back_by_range_and_by_number(tmp_path, name, tokens, dtype):
    layout, rows = ShardLayout(tokens, dtype), numbers(40, tokens, dtype)
    size, digest = write(tmp_path / "s", rows, name, layout)
    assert size == (tmp_path / "s").stat().st_size and digest == sha256_of(tmp_path / "s")
    opened = reader(tmp_path / "s", name, layout)
    assert len(opened) == 40
    assert np.array_equal(opened.read(0, 40), rows) and np.array_equal(opened.read(3, 5), rows[3:5])
    order = np.array([39, 0, 7, 7, 20])
    assert np.array_equal(opened.take(order.tolist()), rows[order])
    assert opened.take([]).shape == (0, tokens)
    for start, stop in ((0, 41), (-1, 3)):
        with pytest.raises(DataError, match="asked for"):
            opened.read(start, stop)
    opened.close()


@pytest.mark.parametrize("compression", ["none", "gzip", "lzf"])
def test_hdf5_is_the_same_bytes_each_time_and_may_be_compressed(tmp_path, compression):
    rows = np.zeros((5000, 9), dtype=np.uint16)
    first = write(tmp_path / "a", rows, "hdf5", compression=compression)
    second = write(tmp_path / "b", rows, "hdf5", compression=compression)
    assert first == second
    assert (first[0] < rows.nbytes / 2) == (compression != "none")
    assert np.array_equal(reader(tmp_path / "a", "hdf5").read(0, 5000), rows)
    with h5py.File(tmp_path / "a") as file:  # any HDF5 program finds it
        assert file["input_ids"].shape == (5000, 9) and file["input_ids"].fletcher32


def test_tfrecord_framing_is_tensorflows():
    # crc32c("123456789") is the check value of the CRC catalogue; the mask is TensorFlow's.
    crc = 0xE3069283
    assert masked_crc32c(b"123456789") == (((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32


def test_the_tfrecord_package_reads_our_shards(tmp_path):
    torch_reader = pytest.importorskip("tfrecord.reader")
    rows = numbers(20)
    write(tmp_path / "s.tfrecord", rows)
    loaded = list(torch_reader.tfrecord_loader(str(tmp_path / "s.tfrecord"), None, {"input_ids": "byte"}))
    assert [np.frombuffer(item["input_ids"], "<u2").tolist() for item in loaded] == rows.tolist()
    index = np.loadtxt(tmp_path / "s.tfindex", dtype=np.int64)
    assert index.shape == (20, 2) and index[:, 1].sum() == (tmp_path / "s.tfrecord").stat().st_size
    half = torch_reader.tfrecord_loader(
        str(tmp_path / "s.tfrecord"), str(tmp_path / "s.tfindex"), {"input_ids": "byte"}, shard=(1, 2)
    )
    assert [np.frombuffer(item["input_ids"], "<u2").tolist() for item in half] == rows[10:].tolist()


@pytest.mark.parametrize("kind", ["int", "byte"])
def test_we_read_shards_of_the_tfrecord_package(tmp_path, kind):
    tfrecord = pytest.importorskip("tfrecord")
    rows = numbers(20)
    writer = tfrecord.TFRecordWriter(str(tmp_path / "s.tfrecord"))
    for row in rows:
        value = row.tolist() if kind == "int" else row.tobytes()
        writer.write({"weight": ([1.5], "float"), "input_ids": (value, kind)})
    writer.close()
    opened = reader(tmp_path / "s.tfrecord")
    assert np.array_equal(opened.read(0, 20), rows)
    assert np.array_equal(opened.take([5, 2]), rows[[5, 2]])


@given(st.lists(st.integers(0, 2**63 - 1), max_size=30))
def test_varints_come_back(values):
    assert decode_varints(b"".join(map(varint, values))).tolist() == values


@given(st.binary(max_size=60))
def test_any_bytes_are_an_example_or_an_example_error(data):
    with contextlib.suppress(ExampleError):
        parse_tokens(data, np.dtype("<u2"))


def flip(path, offset, mask=0x40):
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.write_bytes(bytes(data))


HEAD = 12 + len(example_prefix(18))
STRIDE = HEAD + 18 + 4


@pytest.mark.parametrize(
    ("what", "at", "message"),
    [
        ("length", 2 * STRIDE + 1, "checksum of length is wrong"),
        ("checksum of length", 2 * STRIDE + 9, "checksum of length is wrong"),
        ("name of the feature", 2 * STRIDE + 22, "checksum of payload is wrong"),
        ("payload", 2 * STRIDE + HEAD + 3, "checksum of payload is wrong"),
        ("checksum of payload", 3 * STRIDE - 1, "checksum of payload is wrong"),
    ],
)
def test_a_flipped_bit_is_named_and_the_other_records_stay_readable(tmp_path, what, at, message):
    path, rows = tmp_path / "s", numbers(5)
    write(path, rows)
    flip(path, at)
    opened = reader(path)
    with pytest.raises(DataError, match=rf"s: record 2 at offset {2 * STRIDE}: {message}"):
        opened.read(0, 5)
    with pytest.raises(DataError, match="record 2"):
        opened.take([4, 2])
    assert np.array_equal(opened.take([4, 1]), rows[[4, 1]])


def test_a_flipped_bit_in_the_first_length_is_named(tmp_path):
    write(tmp_path / "s", numbers(5))
    flip(tmp_path / "s", 0)
    with pytest.raises(DataError, match="record 0 at offset 0: checksum of length is wrong"):
        reader(tmp_path / "s")


@pytest.mark.parametrize("cut", [1, 4, 20, STRIDE - 3])
def test_a_truncated_record_is_named(tmp_path, cut):
    write(tmp_path / "s", numbers(5))
    data = (tmp_path / "s").read_bytes()
    (tmp_path / "s").write_bytes(data[:-cut])
    with pytest.raises(DataError, match=rf"record 4 at offset {4 * STRIDE}: the file ends within"):
        reader(tmp_path / "s")


@pytest.mark.parametrize("name", FORMATS)
def test_an_empty_and_a_missing_shard_are_named(tmp_path, name):
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(DataError, match=r"empty: the shard is empty \(0 bytes\)"):
        reader(tmp_path / "empty", name)
    with pytest.raises(DataError, match="gone: the shard is missing"):
        reader(tmp_path / "gone", name)
    with pytest.raises(DataError, match="cannot be read|not a readable"):
        reader(tmp_path, name)


def test_a_flipped_bit_in_hdf5_is_named_with_record_and_offset(tmp_path):
    layout = ShardLayout(4097, "uint16")
    rows = numbers(6, 4097)
    write(tmp_path / "s", rows, "hdf5", layout)
    offset = (tmp_path / "s").read_bytes().find(rows[4].tobytes())
    flip(tmp_path / "s", offset + 1000)
    opened = reader(tmp_path / "s", "hdf5", layout)
    with pytest.raises(DataError, match=rf"record 4 at offset {offset}: .*"):
        opened.read(0, 6)
    with pytest.raises(DataError, match=f"record 4 at offset {offset}"):
        opened.take([1, 4])
    assert np.array_equal(opened.take([5, 0]), rows[[5, 0]])
    (tmp_path / "s").write_bytes((tmp_path / "s").read_bytes()[:-5000])
    with pytest.raises(DataError, match="not a readable HDF5 file|record"):
        reader(tmp_path / "s", "hdf5", layout).read(0, 6)


@pytest.mark.parametrize("name", FORMATS)
def test_sequences_of_another_length_are_refused(tmp_path, name):
    write(tmp_path / "s", numbers(5), name)
    with pytest.raises(DataError, match="expected"):
        reader(tmp_path / "s", name, ShardLayout(8, "uint16")).read(0, 5)


def test_tokens_outside_the_type_are_refused(tmp_path):
    with h5py.File(tmp_path / "s.h5", "w") as file:
        file["input_ids"] = np.full((3, 9), 70_000, dtype=np.int64)
    with pytest.raises(DataError, match="outside the range of uint16"):
        reader(tmp_path / "s.h5", "hdf5").read(0, 3)


@pytest.mark.parametrize("name", FORMATS)
def test_a_shard_has_its_name_only_when_it_is_complete(tmp_path, name):
    writer = get_format(name).open_writer(tmp_path / "s", LAYOUT, {})
    writer.append(numbers(5))
    assert not (tmp_path / "s").exists()
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def try_to_read(path, name):
    """Reads what it can; anything but a DataError is a defect. None where there was one."""
    try:
        opened = get_format(name).open_reader(path, LAYOUT, True)
    except DataError:
        return None
    try:
        rows = opened.read(0, len(opened))
        assert np.array_equal(opened.take(range(len(opened))), rows)
        return rows
    except DataError:
        return None
    finally:
        opened.close()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(min_size=1, max_size=200))
def test_any_bytes_as_tfrecord_give_rows_or_a_data_error(tmp_path, data):
    (tmp_path / "s").write_bytes(data)
    try_to_read(tmp_path / "s", "tfrecord")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payloads=st.lists(st.binary(max_size=40), min_size=1, max_size=4))
def test_any_payload_in_intact_framing_gives_rows_or_a_data_error(tmp_path, payloads):
    framed = b""
    for payload in payloads:
        size = struct.pack("<Q", len(payload))
        framed += size + struct.pack("<I", masked_crc32c(size)) + payload + struct.pack("<I", masked_crc32c(payload))
    (tmp_path / "s").write_bytes(framed)
    try_to_read(tmp_path / "s", "tfrecord")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(FORMATS),
    cut=st.integers(0, 400),
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=4),
)
def test_damaged_shards_give_the_right_rows_or_a_data_error(tmp_path, name, cut, changes):
    path, rows = tmp_path / name, numbers(6)
    write(path, rows, name)
    data = bytearray(path.read_bytes())
    del data[len(data) - cut % len(data) :]
    for place, mask in changes:
        if data:
            data[place % len(data)] ^= mask
    path.write_bytes(bytes(data))
    found = try_to_read(path, name)
    assert found is None or np.array_equal(found, rows[: len(found)])


def test_we_read_a_shard_that_tensorflow_wrote():
    # By tf.io.TFRecordWriter of TensorFlow 2.21: int64 lists and, in the last record, bytes; another feature beside.
    opened = reader(Path(__file__).with_name("tensorflow.tfrecord"))
    assert np.array_equal(opened.read(0, 5), np.arange(45).reshape(5, 9) * 1000 % 65536)
