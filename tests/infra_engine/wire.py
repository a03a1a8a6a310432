"""Values on the wire: Pulumi's property structs to plain Python and back.

Secrets and unknowns travel as marked values. Here a secret becomes `Secret(value)` and an unknown becomes `UNKNOWN`;
integral floats become integers, since JSON numbers are floats and AWS wants integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format, struct_pb2

SIGNATURE = "4dabf18193072939515e22adb298388d"  # key that marks a special value in the Pulumi wire format
SECRET_SIGNATURE = "1b47061264138c4ac30d75fd1eb44270"
UNKNOWN_TEXT = "04da6b54-80e4-46f7-96ec-b56ff0331ba9"  # stands for a value that only apply will know


@dataclass(frozen=True)
class Secret:
    """A value that must not be shown."""

    value: Any

    def __repr__(self) -> str:
        return "[secret]"


class Unknown:
    """A value that is not known before apply."""

    def __repr__(self) -> str:
        return "<known after apply>"


UNKNOWN = Unknown()


def decode(struct: struct_pb2.Struct) -> dict[str, Any]:
    """A property struct as Python values."""
    return {key: _decode(value) for key, value in json_format.MessageToDict(struct).items()}


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if value.get(SIGNATURE) == SECRET_SIGNATURE:
            return Secret(_decode(value["value"]))
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if value == UNKNOWN_TEXT:
        return UNKNOWN
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def encode(values: dict[str, Any]) -> struct_pb2.Struct:
    """Python values as a property struct."""
    return json_format.ParseDict(_encode(values), struct_pb2.Struct())


def _encode(value: Any) -> Any:
    if isinstance(value, Secret):
        return {SIGNATURE: SECRET_SIGNATURE, "value": _encode(value.value)}
    if value is UNKNOWN:
        return UNKNOWN_TEXT
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    return value


def reveal(value: Any) -> Any:
    """The value with every secret opened, for the provider's call."""
    if isinstance(value, Secret):
        return reveal(value.value)
    if isinstance(value, dict):
        return {key: reveal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [reveal(item) for item in value]
    return value


def redact(value: Any) -> Any:
    """The value as `pulumi stack output --json` prints it: secrets hidden."""
    if isinstance(value, Secret):
        return "[secret]"
    if isinstance(value, dict):
        return {key: redact(item) for key, item in value.items()}
    if isinstance(value, list):
        return [redact(item) for item in value]
    return repr(value) if value is UNKNOWN else value


def has_unknown(value: Any) -> bool:
    """Whether anything in the value is not known before apply."""
    if isinstance(value, Secret):
        return has_unknown(value.value)
    if isinstance(value, dict):
        return any(has_unknown(item) for item in value.values())
    if isinstance(value, list):
        return any(has_unknown(item) for item in value)
    return value is UNKNOWN
