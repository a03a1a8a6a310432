"""A moto server on a loopback port, with stand-ins in front, as an account of its own."""

from __future__ import annotations

import io
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from botocore.config import Config
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from tests.infra_engine.stand_ins import StandIns

REGION = "us-east-1"
ENVIRONMENT = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_PROFILE")


class _QuietHandler(WSGIRequestHandler):
    def log(self, type: str, message: str, *arguments: Any) -> None:  # noqa: A002 - the name is werkzeug's
        """No access log."""


class Cloud:
    """The server and the clients to it. `calls` counts what the provider and the account reader asked, by operation."""

    def __init__(self) -> None:
        self.stand_ins = StandIns()
        self.account = "".join(secrets.choice("123456789") for _ in range(12))
        self.calls: list[str] = []
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server: BaseWSGIServer = make_server(
            "127.0.0.1", 0, self._application, threaded=True, request_handler=_QuietHandler
        )
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._clients: dict[str, Any] = {}

    @property
    def url(self) -> str:
        """Where the server listens."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def client(self, service: str) -> Any:
        """A boto3 client of a service; botocore checks the parameters of each call."""
        if service not in self._clients:
            self._clients[service] = boto3.client(
                service,
                region_name=REGION,
                endpoint_url=self.url,
                aws_access_key_id="test",
                aws_secret_access_key="test",
                config=Config(retries={"max_attempts": 1}, s3={"addressing_style": "path"}),
            )
        return self._clients[service]

    def _application(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(length) if length else b""
        target = environ.get("HTTP_X_AMZ_TARGET", "")
        if target or b"Action=" in body[:4096]:
            self.calls.append(target.rpartition(".")[2] or body.partition(b"Action=")[2].split(b"&")[0].decode())
            answer = self.stand_ins.answer(target, body)
            if answer is not None:
                status, content_type, text = answer
                reason = "OK" if status == 200 else "Bad Request"
                start_response(f"{status} {reason}", [("Content-Type", content_type)])
                return [text.encode()]
        environ["wsgi.input"] = io.BytesIO(body)
        environ["HTTP_X_MOTO_ACCOUNT_ID"] = self.account  # so that servers in one process do not see each other
        result: Iterable[bytes] = self._moto(environ, start_response)
        return result

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """End the server and its thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)


@contextmanager
def running_cloud() -> Iterator[Cloud]:
    """A running cloud, to which boto3 in this process also leads by default (for the program's account checks)."""
    cloud = Cloud()
    cloud.start()
    before = {key: os.environ.get(key) for key in ENVIRONMENT}
    os.environ.update(AWS_ENDPOINT_URL=cloud.url, AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test")
    os.environ["AWS_DEFAULT_REGION"] = REGION
    os.environ.pop("AWS_PROFILE", None)
    try:
        yield cloud
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
        cloud.stop()
