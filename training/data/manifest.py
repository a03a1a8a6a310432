"""manifest.json: what a prepared dataset consists of, shard by shard.

The file is written last, in one rename, so a folder with a manifest is a finished dataset. Opening one reads this file
and nothing else: no shard is touched, which is what makes 100,000 shards on a network file system bearable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from training.data.files import write_atomically
from training.errors import DataError

SCHEMA_VERSION = 1
FILE_NAME = "manifest.json"
SPLITS = ("train", "validation")
TOKEN_DTYPES = ("uint16", "uint32")


class ShardEntry(NamedTuple):
    """One shard: file name relative to the dataset, counts, size and hash. `tokens` leaves padding out."""

    file: str
    sequences: int
    tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything a reader has to know. Sequences are `sequence_length` + 1 tokens: inputs and labels overlap by one."""

    format: str
    sequence_length: int
    token_dtype: str
    vocab_size: int
    tokenizer_sha256: str
    splits: Mapping[str, Sequence[ShardEntry]]
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    tokenizer_file: str = "tokenizer.json"
    prepare: Mapping[str, Any] = field(default_factory=dict)

    def sequences(self, split: str) -> int:
        """Number of sequences of a split."""
        return sum(entry.sequences for entry in self.splits.get(split, ()))

    def tokens(self, split: str) -> int:
        """Number of tokens of a split, padding left out."""
        return sum(entry.tokens for entry in self.splits.get(split, ()))

    @property
    def pad_token_id(self) -> int | None:
        """Id that fills a sequence up, or None where no sequence is padded."""
        return self.special_tokens.get("pad")


def write_manifest(folder: Path, manifest: Manifest) -> Path:
    """Writes manifest.json into `folder`, one shard a line, in one step. Raises StorageError."""
    path = folder / FILE_NAME
    write_atomically(path, _to_json(manifest).encode())
    return path


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest of a dataset folder. Raises DataError naming the file and the field at fault."""
    path = folder / FILE_NAME
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"{folder} is not a prepared dataset: there is no {FILE_NAME}",
            f"prepare one with: fab data.prepare --source PATH --out {folder}",
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "check the path and its permissions") from None
    except ValueError as error:
        raise _invalid(path, f"not valid JSON ({error})") from None
    return parse_manifest(data, path)


def parse_manifest(data: Any, path: Path) -> Manifest:
    """Checks the content of a manifest (`path` is for messages). Raises DataError."""
    if not isinstance(data, dict):
        raise _invalid(path, "not a JSON object")
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise DataError(
            f"{path}: schema version {version!r}; this program reads version {SCHEMA_VERSION}",
            "prepare the dataset again, or use the program that wrote it",
        )
    tokenizer = _get(data, "tokenizer", dict, path)
    splits = _get(data, "splits", dict, path)
    dtype = _get(data, "token_dtype", str, path)
    if dtype not in TOKEN_DTYPES:
        raise _invalid(path, f"token_dtype is {dtype!r}, not one of {', '.join(TOKEN_DTYPES)}")
    manifest = Manifest(
        format=_get(data, "format", str, path),
        sequence_length=_get(data, "sequence_length", int, path),
        token_dtype=dtype,
        vocab_size=_get(data, "vocab_size", int, path),
        tokenizer_file=_get(tokenizer, "file", str, path),
        tokenizer_sha256=_get(tokenizer, "sha256", str, path),
        special_tokens=_get(data, "special_tokens", dict, path),
        splits={name: _parse_shards(name, split, path) for name, split in splits.items()},
        prepare=data.get("prepare") or {},
    )
    if manifest.sequence_length < 1 or manifest.vocab_size < 1:
        raise _invalid(path, "sequence_length and vocab_size must be positive")
    return manifest


def _parse_shards(split: str, data: Any, path: Path) -> list[ShardEntry]:
    if not isinstance(data, dict) or not isinstance(data.get("shards"), list):
        raise _invalid(path, f"splits.{split} has no list of shards")
    entries = []
    for number, item in enumerate(data["shards"]):
        try:
            entry = ShardEntry(item["file"], item["sequences"], item["tokens"], item["bytes"], item["sha256"])
        except (KeyError, TypeError) as error:
            raise _invalid(path, f"splits.{split}, shard {number}: missing or wrong field {error}") from None
        if not _is_plausible(entry):
            raise _invalid(path, f"splits.{split}, shard {number} ({entry.file!r}): wrong type or value in {entry}")
        entries.append(entry)
    counted = sum(entry.sequences for entry in entries)
    if data.get("sequences") != counted:
        raise _invalid(path, f"splits.{split} says {data.get('sequences')} sequences, its shards add up to {counted}")
    return entries


def _is_plausible(entry: ShardEntry) -> bool:
    counts = entry.sequences, entry.tokens, entry.bytes
    if not all(type(count) is int and count >= 0 for count in counts):
        return False
    if not isinstance(entry.file, str) or not isinstance(entry.sha256, str) or len(entry.sha256) != 64:
        return False
    # A manifest may come from elsewhere: it must not point outside its folder.
    return bool(entry.file) and not entry.file.startswith("/") and ".." not in entry.file.split("/")


def _get(data: dict[str, Any], key: str, kind: type, path: Path) -> Any:
    value = data.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _invalid(path, f"field {key!r} is missing or not of type {kind.__name__}")
    return value


def _invalid(path: Path, what: str) -> DataError:
    return DataError(f"{path}: {what}", "restore the file from its source, or prepare the dataset again")


def _to_json(manifest: Manifest) -> str:
    head = {
        "schema_version": SCHEMA_VERSION,
        "format": manifest.format,
        "sequence_length": manifest.sequence_length,
        "token_dtype": manifest.token_dtype,
        "vocab_size": manifest.vocab_size,
        "tokenizer": {"file": manifest.tokenizer_file, "sha256": manifest.tokenizer_sha256},
        "special_tokens": dict(manifest.special_tokens),
        "prepare": dict(manifest.prepare),
    }
    lines = json.dumps(head, indent=1, sort_keys=True, ensure_ascii=False)[:-2]
    splits = ",\n".join(_split_json(name, shards) for name, shards in sorted(manifest.splits.items()))
    return f'{lines},\n "splits": {{\n{splits}\n }}\n}}\n'


def _split_json(name: str, shards: Sequence[ShardEntry]) -> str:
    totals = {key: sum(getattr(shard, key) for shard in shards) for key in ("sequences", "tokens", "bytes")}
    rows = ",\n".join("   " + json.dumps(shard._asdict()) for shard in shards)
    body = json.dumps(totals)[1:-1]
    return f'  {json.dumps(name)}: {{{body}, "shards": [\n{rows}\n  ]}}'
