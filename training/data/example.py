"""tf.train.Example, as much of its protobuf encoding as a token sequence needs.

Message layout (tensorflow/core/example): Example.features = 1, Features.feature = 1 (a map: key = 1, value = 2),
Feature.bytes_list = 1, float_list = 2, int64_list = 3, and `value` = 1 in each list.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

FEATURE = "input_ids"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class ExampleError(ValueError):
    """The bytes are no tf.train.Example with a token sequence."""


def varint(value: int) -> bytes:
    """Protobuf's variable-length encoding of a non-negative integer."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def example_prefix(value_bytes: int) -> bytes:
    """All of an Example with one bytes value of `value_bytes` bytes, except that value, which comes last."""
    value_head = b"\x0a" + varint(value_bytes)
    bytes_list = b"\x0a" + varint(len(value_head) + value_bytes) + value_head
    key = b"\x0a" + varint(len(FEATURE)) + FEATURE.encode()
    entry = key + b"\x12" + varint(len(bytes_list) + value_bytes) + bytes_list
    features = b"\x0a" + varint(len(entry) + value_bytes) + entry
    return b"\x0a" + varint(len(features) + value_bytes) + features


def parse_tokens(payload: bytes, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Tokens of a serialized Example: a bytes value read as `dtype`, or an int64 list. Raises ExampleError."""
    names = []
    for features in _submessages(payload, 1):
        for entry in _submessages(features, 1):
            name = b"".join(_submessages(entry, 1)).decode("utf-8", "replace")
            names.append(name)
            if name == FEATURE:
                return _feature_tokens(b"".join(_submessages(entry, 2)), dtype)
    raise ExampleError(f"no feature {FEATURE!r} in the record (features: {', '.join(names) or 'none'})")


def _feature_tokens(feature: bytes, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    for number, wire, content in _fields(feature):
        if number == 1 and wire == _BYTES:
            value = b"".join(_submessages(content, 1))
            if len(value) % dtype.itemsize:
                raise ExampleError(f"{len(value)} bytes of tokens are not a multiple of {dtype.itemsize}")
            return np.frombuffer(value, dtype=dtype)
        if number == 3 and wire == _BYTES:
            return _int64_list(content)
    raise ExampleError(f"feature {FEATURE!r} holds neither bytes nor int64 values")


def _int64_list(message: bytes) -> npt.NDArray[np.int64]:
    parts = []
    for number, wire, content in _fields(message):
        if number == 1 and wire in (_BYTES, _VARINT):  # packed or one by one
            parts.append(decode_varints(content))
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def decode_varints(data: bytes) -> npt.NDArray[np.int64]:
    """All varints of `data`, as int64. Raises ExampleError when the last one is cut or one is longer than 10 bytes."""
    octets = np.frombuffer(data, dtype=np.uint8)
    if not octets.size:
        return np.empty(0, dtype=np.int64)
    ends = np.flatnonzero(octets < 0x80)
    if not ends.size or ends[-1] != len(octets) - 1:
        raise ExampleError("a number is cut off")
    starts = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends - starts + 1
    if lengths.max() > 10:
        raise ExampleError("a number is longer than 10 bytes")
    place = np.arange(len(octets)) - np.repeat(starts, lengths)
    parts = (octets & 0x7F).astype(np.uint64) << (np.uint64(7) * place.astype(np.uint64))
    return np.add.reduceat(parts, starts).view(np.int64)


def _submessages(message: bytes, wanted: int) -> Iterator[bytes]:
    for number, wire, content in _fields(message):
        if number == wanted and wire == _BYTES:
            yield content


def _fields(message: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(field number, wire type, content) of each field; the content of a varint stays encoded."""
    position = 0
    while position < len(message):
        tag, position = _read_varint(message, position)
        number, wire = tag >> 3, tag & 7
        start = position
        if wire == _VARINT:
            _, end = _read_varint(message, position)
        elif wire == _BYTES:
            length, start = _read_varint(message, position)
            end = start + length
        elif wire in (_FIXED64, _FIXED32):
            end = position + (8 if wire == _FIXED64 else 4)
        else:
            raise ExampleError(f"unknown wire type {wire}")
        if end > len(message):
            raise ExampleError("a field is cut off")
        yield number, wire, message[start:end]
        position = end


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(message):
            raise ExampleError("a number is cut off")
        octet = message[position]
        position += 1
        value |= (octet & 0x7F) << shift
        if octet < 0x80:
            return value, position
    raise ExampleError("a number is longer than 10 bytes")
