"""A test engine: serves the Pulumi SDK's ResourceMonitor and Engine interfaces over gRPC, and drives a provider.

It runs the very program file that `pulumi up` runs. What it is not: the real engine (no provider schema, no refresh,
no import, no transforms), and the provider behind it is ours (tests/infra_engine/provider.py).
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import runpy
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # gRPC reports each closed connection otherwise

import grpc
import pulumi
from google.protobuf import empty_pb2
from pulumi.runtime import config as pulumi_config
from pulumi.runtime import settings as pulumi_settings
from pulumi.runtime.proto import engine_pb2, engine_pb2_grpc, provider_pb2, resource_pb2, resource_pb2_grpc
from pulumi.runtime.stack import run_in_stack

from tests.infra_engine.state import Record, StackState, Step, decide, with_ignored
from tests.infra_engine.wire import UNKNOWN, Secret, decode, encode, has_unknown, redact, reveal

STACK_TYPE = "pulumi:pulumi:Stack"
LEVELS = {engine_pb2.INFO: "info", engine_pb2.WARNING: "warning", engine_pb2.ERROR: "error"}


class Provider(Protocol):
    """What the engine asks of a cloud."""

    def check(self, type_token: str, name: str, inputs: dict[str, Any], old: dict[str, Any] | None) -> dict[str, Any]:
        """Inputs completed with defaults, such as made-up names; those of `old` are kept."""

    def create(self, type_token: str, inputs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Make the resource; returns its id and its computed properties."""

    def update(
        self, type_token: str, id_: str, inputs: dict[str, Any], changed: tuple[str, ...], outputs: dict[str, Any]
    ) -> dict[str, Any]:
        """Change the resource in place; returns its computed properties."""

    def delete(self, type_token: str, id_: str, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        """Delete the resource."""

    def invoke(self, token: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Answer a function call of the program."""


class DestroyRefused(Exception):
    """A protected resource stands in the way of destroy."""


@dataclass
class Result:
    """What a run did. `error` is the text a person would see, empty when it went well."""

    steps: list[Step] = field(default_factory=list)
    outputs: dict[str, Any] = field(default_factory=dict)
    logs: list[tuple[str, str]] = field(default_factory=list)
    requests: dict[str, resource_pb2.RegisterResourceRequest] = field(default_factory=dict, repr=False)
    error: str = ""
    crash: str = ""

    def count(self, op: str) -> int:
        """How many steps of a kind, not counting components."""
        return sum(step.op == op and step.type.startswith("aws:") for step in self.steps)

    def changes(self) -> list[Step]:
        """Steps that change something in the cloud."""
        return [step for step in self.steps if step.op != "same" and step.type.startswith("aws:")]

    def output_json(self, *, show_secrets: bool = False) -> dict[str, Any]:
        """The outputs as `pulumi stack output --json` would print them."""
        shown: dict[str, Any] = reveal(self.outputs) if show_secrets else redact(self.outputs)
        return shown


class _Monitor(resource_pb2_grpc.ResourceMonitorServicer):
    """ResourceMonitor: registrations become steps."""

    def __init__(self, engine: Engine, result: Result, *, dry_run: bool) -> None:
        self._engine, self._result, self._dry_run = engine, result, dry_run
        self._lock = threading.RLock()
        self.seen: set[str] = set()

    def GetDeploymentInfo(self, request: Any, context: grpc.ServicerContext) -> Any:
        return resource_pb2.DeploymentInfo(supportedFeatures=[resource_pb2.RESOURCE_MONITOR_FEATURE_SECRETS])

    def SupportsFeature(self, request: Any, context: grpc.ServicerContext) -> Any:
        return resource_pb2.SupportsFeatureResponse(hasSupport=request.id == "secrets")

    def RegisterPackage(self, request: Any, context: grpc.ServicerContext) -> Any:
        return resource_pb2.RegisterPackageResponse(ref=f"{request.name}-{request.version}")

    def SignalAndWaitForShutdown(self, request: Any, context: grpc.ServicerContext) -> Any:
        return empty_pb2.Empty()

    def RegisterResourceOutputs(self, request: Any, context: grpc.ServicerContext) -> Any:
        if request.urn.split("::")[2] == STACK_TYPE:
            self._result.outputs = decode(request.outputs)
        return empty_pb2.Empty()

    def Invoke(self, request: Any, context: grpc.ServicerContext) -> Any:
        arguments = decode(request.args)
        if has_unknown(arguments):
            return resource_pb2.ResourceInvokeResponse(unknown=True)
        try:
            answer = self._engine.provider.invoke(request.tok, reveal(arguments))
        except Exception as fault:  # noqa: BLE001 - any fault of a provider becomes a failure of the call
            failure = provider_pb2.CheckFailure(property="", reason=str(fault))
            return resource_pb2.ResourceInvokeResponse(failures=[failure])
        return resource_pb2.ResourceInvokeResponse(**{"return": encode(answer)})

    def RegisterResource(self, request: Any, context: grpc.ServicerContext) -> Any:
        with self._lock:
            urn = self._engine.urn(request)
            if urn in self.seen:
                context.abort(grpc.StatusCode.ALREADY_EXISTS, f"duplicate resource {urn}")
            self.seen.add(urn)
            self._result.requests[urn] = request
            try:
                record, step = self._engine.register(urn, request, dry_run=self._dry_run)
            except Exception as fault:  # noqa: BLE001 - any fault of a provider ends the run with its text
                self._result.crash = traceback.format_exc()
                context.abort(grpc.StatusCode.UNKNOWN, f"{request.type} {request.name}: {fault}")
            self._result.steps.append(step)
            return resource_pb2.RegisterResourceResponse(urn=urn, id=record.id, object=encode(record.outputs))


class _EngineLog(engine_pb2_grpc.EngineServicer):
    """Engine: keeps the log and the root resource."""

    def __init__(self, result: Result) -> None:
        self._result = result
        self._root = ""

    def Log(self, request: Any, context: grpc.ServicerContext) -> Any:
        if request.severity in LEVELS:
            self._result.logs.append((LEVELS[request.severity], request.message))
        return empty_pb2.Empty()

    def GetRootResource(self, request: Any, context: grpc.ServicerContext) -> Any:
        return engine_pb2.GetRootResourceResponse(urn=self._root)

    def SetRootResource(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._root = request.urn
        return engine_pb2.SetRootResourceResponse()


class _QuietStub:
    """The Engine interface over gRPC, without the SDK's debug messages: they are most of a run's calls."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = engine_pb2_grpc.EngineStub(channel)

    def Log(self, request: Any) -> Any:
        return empty_pb2.Empty() if request.severity == engine_pb2.DEBUG else self._stub.Log(request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stub, name)


class Engine:
    """One stack: `preview`, `up`, `destroy`. Keeps its state between runs."""

    def __init__(self, provider: Provider, *, project: str = "loopworks", stack: str = "test") -> None:
        self.provider, self.project, self.stack = provider, project, stack
        self.state = StackState()

    def urn(self, request: resource_pb2.RegisterResourceRequest) -> str:
        """The resource's name in the state: parent types, type and name, as Pulumi builds it."""
        qualified = request.type
        if request.parent and request.parent.split("::")[2] != STACK_TYPE:
            qualified = f"{request.parent.split('::')[2]}${request.type}"
        return f"urn:pulumi:{self.stack}::{self.project}::{qualified}::{request.name}"

    def register(
        self, urn: str, request: resource_pb2.RegisterResourceRequest, *, dry_run: bool
    ) -> tuple[Record, Step]:
        """Decide about one registration and, unless `dry_run`, carry it out."""
        old = self.state.records.get(urn)
        ignored = tuple(request.ignoreChanges)
        inputs = with_ignored(decode(request.object), old, ignored)
        if request.custom:
            inputs = self.provider.check(request.type, request.name, inputs, old.inputs if old else None)
        op, changed = decide(request.type, inputs, old)
        record = Record(
            urn=urn,
            type=request.type,
            name=request.name,
            custom=request.custom,
            inputs=inputs,
            outputs=dict(inputs),
            id="",
            parent=request.parent,
            protect=request.protect,
            retain=request.retainOnDelete,
            ignore_changes=ignored,
            dependencies=tuple(request.dependencies),
        )
        if request.custom:
            self._carry_out(record, op, changed, old, dry_run=dry_run)
        if not dry_run:
            self.state.records[urn] = record
        return record, Step(op, urn, request.type, request.name, changed)

    def _carry_out(
        self, record: Record, op: str, changed: tuple[str, ...], old: Record | None, *, dry_run: bool
    ) -> None:
        if op == "same" and old is not None:
            record.id, record.outputs = old.id, old.outputs
        elif dry_run:
            if op == "update" and old is not None:
                record.id, record.outputs = old.id, {**old.outputs, **record.inputs}
            return
        elif op == "update" and old is not None:
            computed = self.provider.update(record.type, old.id, reveal(record.inputs), changed, old.outputs)
            record.id, record.outputs = old.id, {**old.outputs, **record.inputs, **computed}
        else:
            if old is not None:
                self._delete(old)
            record.id, computed = self.provider.create(record.type, reveal(record.inputs))
            record.outputs = {**record.inputs, **computed}

    def _delete(self, record: Record) -> None:
        if record.custom and not record.retain:
            self.provider.delete(record.type, record.id, reveal(record.inputs), record.outputs)
        self.state.records.pop(record.urn, None)

    def preview(self, program: Path, config: dict[str, Any]) -> Result:
        """Run the program without changing anything; the steps are the plan."""
        result, seen = self._run(program, config, dry_run=True)
        if not result.error:
            result.steps += [Step("delete", r.urn, r.type, r.name) for r in self._unseen(seen)]
        return result

    def up(self, program: Path, config: dict[str, Any]) -> Result:
        """Run the program and make, change and delete what it asks for."""
        result, seen = self._run(program, config, dry_run=False)
        if not result.error:
            for record in self._unseen(seen):
                if record.protect:
                    result.error = f"{record.urn} is protected and the program no longer has it"
                    break
                self._delete(record)
                result.steps.append(Step("delete", record.urn, record.type, record.name))
            self.state.outputs = result.outputs
        return result

    def _unseen(self, seen: set[str]) -> list[Record]:
        return [record for urn, record in reversed(self.state.records.items()) if urn not in seen]

    def destroy(self, *, exclude_protected: bool = False) -> list[Step]:
        """Delete everything in reverse order. Protected resources stop it, or stay with `exclude_protected`.

        Raises DestroyRefused, before anything is deleted, where a resource is protected and not excluded.
        """
        protected = [record for record in self.state.records.values() if record.protect]
        if protected and not exclude_protected:
            raise DestroyRefused(f"{protected[0].name} is protected; use --exclude-protected or unprotect it")
        steps: list[Step] = []
        for record in list(reversed(self.state.records.values())):
            if record.protect:
                continue
            self._delete(record)
            steps.append(Step("retain" if record.retain else "delete", record.urn, record.type, record.name))
        self.state.outputs = {}
        return steps

    def _run(self, program: Path, config: dict[str, Any], *, dry_run: bool) -> tuple[Result, set[str]]:
        result = Result()
        monitor = _Monitor(self, result, dry_run=dry_run)
        with _serve(monitor, _EngineLog(result)) as channel:
            context = contextvars.copy_context()
            context.run(self._run_program, program, config, channel, dry_run, result)
        return result, monitor.seen

    def _run_program(
        self, program: Path, config: dict[str, Any], channel: grpc.Channel, dry_run: bool, result: Result
    ) -> None:
        strings = {key: reveal(value) for key, value in config.items()}
        secrets = [key for key, value in config.items() if isinstance(value, Secret)]
        pulumi_config.set_all_config(strings, secrets)
        settings = pulumi_settings.Settings(
            project=self.project,
            stack=self.stack,
            monitor=resource_pb2_grpc.ResourceMonitorStub(channel),
            engine=_QuietStub(channel),
            dry_run=dry_run,
            parallel=16,
        )
        pulumi_settings.configure(settings)
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(run_in_stack(lambda: _execute(program)))
        except pulumi.RunError as fault:
            result.error = str(fault)
        except Exception as fault:  # noqa: BLE001 - a test engine must report any failure of the program
            result.error = str(fault)
            result.crash = result.crash or traceback.format_exc()
        finally:
            loop.close()
            asyncio.set_event_loop(None)


def _execute(program: Path) -> None:
    runpy.run_path(str(program), run_name="__main__")


@contextmanager
def _serve(monitor: _Monitor, log: _EngineLog) -> Iterator[grpc.Channel]:
    server = grpc.server(ThreadPoolExecutor(max_workers=32))
    resource_pb2_grpc.add_ResourceMonitorServicer_to_server(monitor, server)
    engine_pb2_grpc.add_EngineServicer_to_server(log, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        server.stop(grace=None).wait()


def stack_config(values: dict[str, Any], *, secrets: tuple[str, ...] = ()) -> dict[str, Any]:
    """Configuration as the CLI hands it to a program: text, lists as JSON; keys of `secrets` are marked."""
    strings: dict[str, Any] = {}
    for key, value in values.items():
        namespace = "aws" if key in ("region", "profile") else "loopworks"
        text = value if isinstance(value, str) else json.dumps(value)
        strings[f"{namespace}:{key}"] = Secret(text) if key in secrets else text
    return strings


__all__ = ["UNKNOWN", "DestroyRefused", "Engine", "Result", "stack_config"]
