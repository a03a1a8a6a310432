"""Checkpoints in an S3-compatible object store, by the same protocol as on disk: files, manifest, marker last.

    s3://bucket/prefix/step-00000120/deepspeed/...   manifest.json   COMMIT

Credentials come from the usual AWS chain and are never read from the configuration. Each request carries an MD5 of
its body, which every S3-compatible store checks on arrival; the sha256 of the manifest are checked after each
download. Imports boto3 only when a store is used.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.checkpoint import layout
from training.checkpoint.errors import RemoteError
from training.checkpoint.hashing import HashingFile
from training.checkpoint.layout import Manifest
from training.checkpoint.remote_errors import translated
from training.checkpoint.upload_progress import UploadProgress, note_uploaded

MIB = 1 << 20


@dataclass(frozen=True)
class S3Settings:
    """Where the store is and how hard it is used."""

    url: str
    endpoint_url: str | None = None
    concurrency: int = 8
    part_bytes: int = 32 * MIB

    @property
    def bucket(self) -> str:
        """The bucket in s3://bucket/prefix."""
        return self.url.removeprefix("s3://").split("/", 1)[0]

    @property
    def prefix(self) -> str:
        """The prefix in s3://bucket/prefix, with a slash at its end unless it is empty."""
        rest = self.url.removeprefix("s3://").partition("/")[2].strip("/")
        return f"{rest}/" if rest else ""


class S3Store:
    """Uploads, lists and fetches checkpoints. Methods raise RemoteError (act) or RemoteUnavailable (wait)."""

    def __init__(self, settings: S3Settings, client: Any = None) -> None:
        self.settings = settings
        self.where = settings.endpoint_url or "AWS S3"
        self._client = client or self._guard(lambda: _make_client(settings))

    def check(self) -> None:
        """Asks for one key, so that wrong credentials or a missing bucket are known before hours of training."""
        self._call("list_objects_v2", Prefix=self.settings.prefix, MaxKeys=1)

    def steps(self) -> dict[int, str]:
        """Returns the committed steps with the content of their markers (one request a page, one a step)."""
        found: dict[int, str] = {}
        token: dict[str, str] = {}
        while True:
            page = self._call("list_objects_v2", Prefix=f"{self.settings.prefix}step-", Delimiter="/", **token)
            for item in page.get("CommonPrefixes", ()):
                step = layout.parse_step(item["Prefix"].rstrip("/").rsplit("/", 1)[-1])
                marker = self._read(step, layout.COMMIT_NAME) if step is not None else None
                if step is not None and marker is not None:
                    found[step] = marker.decode(errors="replace")
            if not page.get("IsTruncated"):
                return found
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def manifest(self, step: int) -> Manifest:
        """Returns the manifest of a committed step, checked against its marker."""
        marker, data = self._read(step, layout.COMMIT_NAME), self._read(step, layout.MANIFEST_NAME)
        name = layout.step_name(step)
        if marker is None or data is None:
            raise RemoteError(f"{name} is not complete in {self.settings.url}", "take another step (`fab checkpoints`)")
        try:
            manifest = Manifest.from_bytes(data)
        except ValueError as error:
            raise RemoteError(f"{name} in {self.settings.url}: {error}", "take another step") from None
        if manifest.step != step or marker != layout.commit_bytes(step, data):
            raise RemoteError(f"{name} in {self.settings.url}: marker and manifest do not fit", "take another step")
        return manifest

    def download(self, step: int, target: Path, manifest: Manifest) -> None:
        """Fetches the files that `target` lacks or has damaged; each is checked before it gets its name."""

        def fetch(name: str) -> None:
            path, entry = target / name, manifest.files[name]
            if path.is_file() and layout.hash_file(path) == entry:
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.name}.part")
            with self._translated():
                try:
                    body = self._client.get_object(Bucket=self.settings.bucket, Key=self._key(step, name))["Body"]
                except self._client.exceptions.NoSuchKey:
                    raise RemoteError(
                        f"{layout.step_name(step)}: {name} is missing in the store", "take another"
                    ) from None
                with HashingFile(part) as file:
                    for chunk in body.iter_chunks(MIB):
                        file.write(chunk)
            if file.entry != entry:
                part.unlink()
                raise RemoteError(
                    f"{layout.step_name(step)}: {name} arrived with another sha256 than it was saved with",
                    "take another step (`fab checkpoints`)",
                )
            part.rename(path)

        with ThreadPoolExecutor(self.settings.concurrency) as pool:
            list(pool.map(fetch, manifest.files))

    def upload(self, folder: Path) -> None:
        """Uploads a committed checkpoint; an earlier, interrupted upload goes on where it stopped.

        Raises FileNotFoundError when the folder is removed meanwhile (retention).
        """
        manifest = layout.read_manifest(folder)
        marker = (folder / layout.COMMIT_NAME).read_bytes()
        present = self._read(manifest.step, layout.COMMIT_NAME)
        if present != marker:
            if present is not None:  # the same step, saved again after a rollback or a damaged copy
                self._refuse_older(manifest, present)
                self._call("delete_object", Key=self._key(manifest.step, layout.COMMIT_NAME))
            progress = UploadProgress(folder, marker)
            self._upload_files(folder, manifest, progress)
            self._put(manifest.step, layout.MANIFEST_NAME, (folder / layout.MANIFEST_NAME).read_bytes())
            self._put_marker(manifest.step, marker)
        note_uploaded(folder, marker)

    def delete(self, step: int) -> None:
        """Removes a step, its marker first, so that no half of it is ever taken for a whole."""
        self._call("delete_object", Key=self._key(step, layout.COMMIT_NAME))
        token: dict[str, str] = {}
        while True:
            page = self._call("list_objects_v2", Prefix=self._key(step, ""), **token)
            for item in page.get("Contents", ()):
                self._call("delete_object", Key=item["Key"])
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    # --- one file -----------------------------------------------------------------------------------------------------

    def _upload_files(self, folder: Path, manifest: Manifest, progress: UploadProgress) -> None:
        large = {n for n, e in manifest.files.items() if e.size_bytes > self.settings.part_bytes}
        with ThreadPoolExecutor(self.settings.concurrency) as pool:
            small = [n for n in manifest.files if n not in large and n not in progress.done]

            def put(name: str) -> None:
                self._put(manifest.step, name, (folder / name).read_bytes())
                progress.finish(name)

            list(pool.map(put, small))
            # Files one after another, their parts side by side: never more than `concurrency` parts in memory.
            for name in sorted(large - progress.done):
                self._upload_parts(pool, folder, manifest, name, progress)

    def _upload_parts(
        self, pool: ThreadPoolExecutor, folder: Path, manifest: Manifest, name: str, progress: UploadProgress
    ) -> None:
        key, size = self._key(manifest.step, name), manifest.files[name].size_bytes
        # A store takes at most 10,000 parts of one object.
        part_bytes = max(self.settings.part_bytes, -(-size // 10_000))
        upload_id = progress.upload_id(name, part_bytes)
        if upload_id is None or not self._upload_is_known(key, upload_id):
            upload_id = self._call("create_multipart_upload", Key=key)["UploadId"]
            progress.begin(name, upload_id, part_bytes)

        def put(number: int) -> None:
            if progress.part(name, number) is None:
                with (folder / name).open("rb") as file:
                    file.seek((number - 1) * part_bytes)
                    body = file.read(part_bytes)
                answer = self._call(
                    "upload_part", Key=key, UploadId=upload_id, PartNumber=number, Body=body, ContentMD5=_md5(body)
                )
                progress.add_part(name, number, answer["ETag"])

        count = -(-size // part_bytes)
        list(pool.map(put, range(1, count + 1)))
        parts = [{"PartNumber": n, "ETag": progress.part(name, n)} for n in range(1, count + 1)]
        self._call("complete_multipart_upload", Key=key, UploadId=upload_id, MultipartUpload={"Parts": parts})
        progress.finish(name)

    def _upload_is_known(self, key: str, upload_id: str) -> bool:
        with self._translated():
            try:
                self._client.list_parts(Bucket=self.settings.bucket, Key=key, UploadId=upload_id, MaxParts=1)
            except self._client.exceptions.ClientError as error:
                if error.response["Error"]["Code"] in ("NoSuchUpload", "404", "NoSuchKey"):
                    return False
                raise
        return True

    def _put(self, step: int, name: str, body: bytes) -> None:
        self._call("put_object", Key=self._key(step, name), Body=body, ContentMD5=_md5(body))

    def _put_marker(self, step: int, marker: bytes) -> None:
        """Writes the marker unless there is one: two runs that save the same step cannot both win."""
        key, bucket = self._key(step, layout.COMMIT_NAME), self.settings.bucket
        with self._translated():
            try:
                self._client.put_object(Bucket=bucket, Key=key, Body=marker, ContentMD5=_md5(marker), IfNoneMatch="*")
                return
            except self._client.exceptions.ClientError as error:
                code = error.response["Error"]["Code"]
                if code not in (
                    "PreconditionFailed",
                    "ConditionalRequestConflict",
                    "412",
                    "409",
                    "NotImplemented",
                    "501",
                ):
                    raise
        if code in ("NotImplemented", "501"):  # the store has no conditional put
            self._put(step, layout.COMMIT_NAME, marker)
        elif self._read(step, layout.COMMIT_NAME) != marker:
            raise RemoteError(
                f"another run has just uploaded a different {layout.step_name(step)} to {self.settings.url}",
                "stop the other run, or give this one its own checkpoint.remote",
            )

    def _refuse_older(self, manifest: Manifest, present: bytes) -> None:
        there = self._read(manifest.step, layout.MANIFEST_NAME)
        with contextlib.suppress(ValueError):
            if there is not None and Manifest.from_bytes(there).created_unix_s > manifest.created_unix_s:
                raise RemoteError(
                    f"{self.settings.url} holds a newer {layout.step_name(manifest.step)} than this run",
                    "stop the other run, or give this one its own checkpoint.remote",
                )

    # --- requests -----------------------------------------------------------------------------------------------------

    def _read(self, step: int | None, name: str) -> bytes | None:
        if step is None:
            return None
        with self._translated():
            try:
                answer = self._client.get_object(Bucket=self.settings.bucket, Key=self._key(step, name))
                data: bytes = answer["Body"].read()
            except self._client.exceptions.NoSuchKey:
                return None
        return data

    def _key(self, step: int, name: str) -> str:
        return f"{self.settings.prefix}{layout.step_name(step)}/{name}"

    def _call(self, operation: str, **arguments: Any) -> Any:
        with self._translated():
            return getattr(self._client, operation)(Bucket=self.settings.bucket, **arguments)

    def _translated(self) -> contextlib.AbstractContextManager[None]:
        return translated(self.where, self.settings.bucket)

    def _guard(self, make: Callable[[], Any]) -> Any:
        with self._translated():
            return make()


def _md5(body: bytes) -> str:
    return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()


def _make_client(settings: S3Settings) -> Any:
    import boto3
    from botocore.config import Config

    # A session of its own: the default one keeps the credentials that it found first.
    return boto3.session.Session().client(
        "s3",
        endpoint_url=settings.endpoint_url,
        config=Config(
            retries={"mode": "standard", "max_attempts": 3},
            connect_timeout=10,
            read_timeout=60,
            max_pool_connections=settings.concurrency + 2,
            # Newer checksum headers are unknown to many S3-compatible stores; MD5 is known to all, and is always sent.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path"} if settings.endpoint_url else None,
        ),
    )
