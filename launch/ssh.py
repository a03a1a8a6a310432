"""SSH to many hosts: verified host keys, a bounded pool, and a deadline on everything."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from launch.errors import LoopworksError
from launch.nodes import Node

Result = TypeVar("Result")

CONNECT_TIMEOUT_S = 10.0
CONNECT_TRIES = 3
COMMAND_TIMEOUT_S = 60.0
# A bastion's sshd refuses bursts (MaxStartups is 10:30:100 by default).
POOL_SIZE = 16
MOST_OUTPUT_BYTES = 8 * 2**20
CHUNK_BYTES = 256 * 1024


class HostError(LoopworksError):
    """A host cannot be used. `kind`: host_key, auth, unreachable, timeout, disk_full or command."""

    def __init__(self, node: str, kind: str, cause: str, remedy: str = "") -> None:
        super().__init__(f"{node}: {cause}", remedy)
        self.node, self.kind = node, kind


@dataclass(frozen=True)
class Outcome:
    """How a remote command ended."""

    code: int
    output: bytes
    errors: bytes

    @property
    def text(self) -> str:
        """What it printed."""
        return self.output.decode(errors="replace")

    @property
    def reason(self) -> str:
        """The last line it said on standard error, or its exit code."""
        lines = self.errors.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self.code}"


class Remote:
    """One host: connects when first used, and again after the connection broke."""

    def __init__(self, node: Node, ssh_config: str | None = None, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        self.node = node
        self._ssh_config = ssh_config
        self.connect_timeout_s = connect_timeout_s
        self._connection: Any = None
        self._lock = threading.Lock()

    def run(self, command: str, stdin: bytes = b"", timeout_s: float = COMMAND_TIMEOUT_S) -> Outcome:
        """Runs a shell command and returns its outcome. Raises HostError when that is not possible in time."""
        with self._lock:
            try:
                return self._run(command, stdin, time.monotonic() + timeout_s)
            except (TimeoutError, socket.timeout):  # noqa: UP041 (two classes before Python 3.10)
                self.close()
                raise HostError(
                    self.node.name, "timeout", f"no answer within {timeout_s:.0f} s", "is the host hanging?"
                ) from None
            except (OSError, EOFError, _ssh_error()) as error:
                self.close()
                raise HostError(self.node.name, "unreachable", f"connection lost ({error})") from None

    def close(self) -> None:
        """Drops the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError, EOFError, _ssh_error()):
                connection.close()

    def _run(self, command: str, stdin: bytes, deadline: float) -> Outcome:
        channel = self._open(deadline).get_transport().open_session(timeout=_left(deadline))
        with contextlib.closing(channel):
            channel.settimeout(_left(deadline))
            channel.exec_command(command)
            _feed(channel, stdin, deadline)
            output, errors = _drain(channel, deadline)
            return Outcome(channel.recv_exit_status(), output, errors)

    def _open(self, deadline: float) -> Any:
        transport = self._connection.client.get_transport() if self._connection is not None else None
        if transport is None or not transport.is_active():
            self.close()
            self._connection = connect(self.node, self._ssh_config, min(self.connect_timeout_s, _left(deadline)))
        return self._connection.client


def connect(node: Node, ssh_config: str | None, timeout_s: float) -> Any:
    """Returns an open fabric Connection whose host key is known. Raises HostError."""
    paramiko = _paramiko()

    failure: Exception = TimeoutError()
    for attempt in range(CONNECT_TRIES):
        connection = _connection(node, ssh_config, timeout_s)
        try:
            connection.open()
            connection.client.get_transport().set_keepalive(10)
            return connection
        except (paramiko.BadHostKeyException, UnknownHostKeyError, paramiko.AuthenticationException) as error:
            connection.close()
            raise _refused(node, error) from None
        except (OSError, EOFError, paramiko.SSHException) as error:
            connection.close()
            failure = error
            if isinstance(error, (socket.gaierror, ConnectionRefusedError)) or "timed out" in str(error):
                break
            time.sleep(0.3 * (attempt + 1))
    raise _unreachable(node, failure, timeout_s)


class UnknownHostKeyError(Exception):
    """No known_hosts file has a key for this host."""


def _connection(node: Node, ssh_config: str | None, timeout_s: float) -> Any:
    from fabric import Config, Connection

    path = ssh_config or os.environ.get("LOOPWORKS_SSH_CONFIG")
    config = Config(runtime_ssh_path=path) if path else Config()
    kwargs: dict[str, Any] = {"timeout": timeout_s, "banner_timeout": timeout_s, "auth_timeout": timeout_s}
    if node.key:
        kwargs["key_filename"] = str(Path(node.key).expanduser())
    gateway: Any = node.proxy_command
    for hop in reversed((node.jump or "").split(",")):
        if hop:
            gateway = Connection(hop, config=config.clone(), gateway=gateway, connect_kwargs=dict(kwargs))
    connection = Connection(
        node.host, user=node.user, port=node.port, config=config, gateway=gateway, connect_kwargs=kwargs
    )
    _know_host_keys(connection, node.known_hosts)
    return connection


def _know_host_keys(connection: Any, known_hosts: str | None) -> None:
    """Fabric accepts any host key; here the known ones count, for the host and for each hop before it."""

    class Reject:
        def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
            raise UnknownHostKeyError(f"{hostname} shows a {key.get_name()} key {key.fingerprint}")

    while hasattr(connection, "client"):
        named = known_hosts or connection.ssh_config.get("userknownhostsfile", "~/.ssh/known_hosts")
        for name in [*named.split(), "/etc/ssh/ssh_known_hosts"]:
            path = Path(name.strip('"')).expanduser()
            if path.is_file():
                connection.client.load_host_keys(str(path))
        connection.client.set_missing_host_key_policy(Reject())
        connection = connection.gateway


def _refused(node: Node, error: Exception) -> HostError:
    paramiko = _paramiko()

    if isinstance(error, paramiko.BadHostKeyException):
        cause = "its host key has CHANGED: another machine has taken its place, or it was installed anew"
        remedy = f"find out which; if it was installed anew: ssh-keygen -R {node.host}, then ssh {node.host} once"
        return HostError(node.name, "host_key", cause, remedy)
    if isinstance(error, UnknownHostKeyError):
        remedy = f"compare the fingerprint with the console's, then add it to known_hosts: ssh {node.host} once"
        return HostError(node.name, "host_key", f"its host key is not known ({error})", remedy)
    return HostError(
        node.name,
        "auth",
        "it refuses our key",
        f"add your public key to authorized_keys there (does ssh {node.host} work without a password?)",
    )


def _unreachable(node: Node, error: Exception, timeout_s: float) -> HostError:
    reason = str(error) or f"no connection within {timeout_s:.0f} s"
    if isinstance(error, socket.gaierror):
        return HostError(node.name, "unreachable", f"the name {node.host} does not resolve", "check the spelling")
    if isinstance(error, TimeoutError) or "banner" in reason or "timed out" in reason:
        cause = f"no SSH answer within {timeout_s:.0f} s"
        return HostError(node.name, "timeout", cause, "is it up, is port 22 open, does it hang?")
    return HostError(node.name, "unreachable", f"SSH failed: {reason}", "is sshd running there?")


def on_all(
    remotes: Iterable[Remote], action: Callable[[Remote], Result], pool_size: int = POOL_SIZE
) -> dict[str, Result | HostError]:
    """Does `action` on all hosts, at most `pool_size` at a time; a host that fails has its HostError as result."""

    def one(remote: Remote) -> Result | HostError:
        try:
            return action(remote)
        except HostError as error:
            return error

    hosts = list(remotes)
    with ThreadPoolExecutor(max_workers=max(1, min(pool_size, len(hosts))), thread_name_prefix="ssh") as pool:
        return dict(zip([host.node.name for host in hosts], pool.map(one, hosts), strict=True))


def _feed(channel: Any, stdin: bytes, deadline: float) -> None:
    view = memoryview(stdin)
    while view.nbytes:
        channel.settimeout(_left(deadline))
        try:
            view = view[channel.send(view[:CHUNK_BYTES]) :]
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            break  # the command has ended without reading it all; its exit code tells
    channel.shutdown_write()


def _drain(channel: Any, deadline: float) -> tuple[bytes, bytes]:
    """Reads both streams to their end, whichever speaks, keeping at most MOST_OUTPUT_BYTES of each."""
    parts: tuple[bytearray, bytearray] = (bytearray(), bytearray())
    while True:
        # Looked at before the reading: what came before the end is then always read.
        ended = channel.exit_status_ready() and (channel.eof_received or channel.closed)
        busy = False
        for part, ready, receive in (
            (parts[0], channel.recv_ready, channel.recv),
            (parts[1], channel.recv_stderr_ready, channel.recv_stderr),
        ):
            while ready():
                busy = True
                part.extend(receive(CHUNK_BYTES)[: MOST_OUTPUT_BYTES - len(part)])
        if ended and not busy:
            return bytes(parts[0]), bytes(parts[1])
        if not busy:
            _left(deadline)
            time.sleep(0.01)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _ssh_error() -> type[Exception]:
    error: type[Exception] = _paramiko().SSHException
    return error


def _paramiko() -> Any:
    """Imported when it is needed: a run on this machine does not wait for it."""
    import paramiko  # type: ignore[import-untyped]

    return paramiko
