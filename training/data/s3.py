"""What data needs of an object store that speaks S3. Credentials and endpoint come from the environment."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from training.errors import DataError, UsageError

PREFIX = "s3://"
_ATTEMPTS = 5
_REMEDY = "check the address, the credentials (aws sts get-caller-identity) and the network"
FIRST_PAUSE_S = 0.5
_PASSING_STATUS = (408, 429)  # of the 4xx answers only these are worth another try
Result = TypeVar("Result")


class TransientError(DataError):
    """A fault of network, store or transfer that may be gone at the next try."""


class S3Object(NamedTuple):
    """An object: its URL, size and time of last change in nanoseconds."""

    url: str
    size: int
    mtime_ns: int


def split_url(url: str) -> tuple[str, str]:
    """("bucket", "key") of s3://bucket/key. Raises UsageError."""
    bucket, _, key = url.removeprefix(PREFIX).partition("/")
    if not url.startswith(PREFIX) or not bucket:
        raise UsageError(f"{url!r} is not of the form s3://bucket/key", "correct the address")
    return bucket, key


@lru_cache(maxsize=1)
def client() -> Any:
    """The boto3 client of this process."""
    import boto3
    from botocore.config import Config

    return boto3.client("s3", config=Config(retries={"mode": "standard", "max_attempts": 3}))


def list_objects(url: str) -> list[S3Object]:
    """The object `url`, or all objects below it when it is a folder, by name. Raises DataError."""
    bucket, key = split_url(url)
    with _errors(url):
        if key and not key.endswith("/") and (found := _head(bucket, key)) is not None:
            return [found]
        prefix = key if not key or key.endswith("/") else f"{key}/"
        pages = client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        entries = [entry for page in pages for entry in page.get("Contents", ()) if not entry["Key"].endswith("/")]
    root = f"{PREFIX}{bucket}/"
    return sorted(S3Object(root + e["Key"], int(e["Size"]), _nanoseconds(e["LastModified"])) for e in entries)


def describe(url: str) -> S3Object | None:
    """Size and age of an object, None when it does not exist. Raises DataError."""
    with _errors(url):
        return _head(*split_url(url))


def _head(bucket: str, key: str) -> S3Object | None:
    from botocore.exceptions import ClientError

    try:
        found = client().head_object(Bucket=bucket, Key=key)
    except ClientError as error:
        if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 404:
            return None
        raise
    return S3Object(f"{PREFIX}{bucket}/{key}", int(found["ContentLength"]), _nanoseconds(found["LastModified"]))


def _nanoseconds(moment: Any) -> int:
    return int(moment.timestamp()) * 10**9


def download(url: str, path: Path, check: Callable[[Path], str | None] = lambda path: None) -> None:
    """Fetches an object into `path`, which appears complete or not at all; a failed try is repeated with a pause.

    `check` names what is wrong with the file that came, or None: a wrong one is fetched again. Raises DataError,
    StorageError when the local disk does not take it.
    """
    from training.data.files import storage_errors

    bucket, key = split_url(url)
    temporary = path.with_name(f".{path.name}.part")
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)

    def attempt() -> None:
        with _errors(url):
            body = client().get_object(Bucket=bucket, Key=key)["Body"]
            with storage_errors(path), temporary.open("wb") as stream:
                while piece := body.read(1 << 20):
                    stream.write(piece)
        if fault := check(temporary):
            raise TransientError(f"{url}: {fault} after download", "upload this shard again from a copy that verifies")
        temporary.replace(path)

    try:
        retry(attempt)
    finally:
        temporary.unlink(missing_ok=True)


def retry(action: Callable[[], Result], attempts: int = _ATTEMPTS) -> Result:
    """Result of `action`; a TransientError is tried again, with pauses that double, `attempts` times in all."""
    for number in range(attempts - 1):
        try:
            return action()
        except TransientError:
            time.sleep(FIRST_PAUSE_S * 2**number)
    return action()


@contextlib.contextmanager
def _errors(url: str) -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError

    try:
        yield
    except ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
        kind = DataError if 400 <= status < 500 and status not in _PASSING_STATUS else TransientError
        raise kind(f"{url}: {error}", _REMEDY) from None
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise DataError(f"{url}: {error}", _REMEDY) from None
    except (BotoCoreError, ConnectionError, TimeoutError) as error:
        raise TransientError(f"{url}: {error}", _REMEDY) from None
