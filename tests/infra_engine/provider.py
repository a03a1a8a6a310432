"""Resource types to AWS calls through boto3. The registry is filled by the aws_*.py modules beside this one."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.infra_engine.cloud import Cloud

Inputs = dict[str, Any]
Created = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Handler:
    """How one resource type is made, changed and deleted. Without `update` a change puts it again by `create`."""

    create: Callable[[Cloud, Inputs], Created]
    delete: Callable[[Cloud, str, Inputs, dict[str, Any]], None] | None = None
    update: Callable[[Cloud, str, Inputs, tuple[str, ...], dict[str, Any]], dict[str, Any]] | None = None
    put_again: bool = False
    name_property: str = ""


REGISTRY: dict[str, Handler] = {}


def api(value: Any) -> Any:
    """Keys in the API's spelling: `deviceIndex` to `DeviceIndex`, all the way down."""
    if isinstance(value, dict):
        return {key[0].upper() + key[1:]: api(item) for key, item in value.items()}
    return [api(item) for item in value] if isinstance(value, list) else value


def flags(entry: dict[str, Any], *keys: str) -> dict[str, Any]:
    """The entry with the text "true" or "false" of these keys as booleans."""
    return {key: value == "true" if key in keys and isinstance(value, str) else value for key, value in entry.items()}


def tag_list(inputs: Inputs) -> list[dict[str, str]]:
    """Tags as EC2 and most others take them."""
    return [{"Key": key, "Value": value} for key, value in inputs.get("tags", {}).items()]


def tag_specification(inputs: Inputs, kind: str) -> list[dict[str, Any]]:
    """Tags as EC2 takes them on creation."""
    return [{"ResourceType": kind, "Tags": tag_list(inputs)}] if inputs.get("tags") else []


class AwsProvider:
    """The provider of the test engine: every call goes through boto3 to the cloud."""

    def __init__(self, cloud: Cloud) -> None:
        from tests.infra_engine import aws_compute, aws_control, aws_network, aws_storage

        self._cloud = cloud
        for module in (aws_network, aws_compute, aws_storage, aws_control):
            REGISTRY.update(module.HANDLERS)

    def _handler(self, type_token: str) -> Handler:
        if type_token not in REGISTRY:
            raise NotImplementedError(f"the test engine has no handler for {type_token}")
        return REGISTRY[type_token]

    def check(self, type_token: str, name: str, inputs: Inputs, old: Inputs | None) -> Inputs:
        """Complete a missing physical name, as the provider does, and keep the one of before."""
        key = self._handler(type_token).name_property
        if not key or inputs.get(key):
            return inputs
        kept = old.get(key) if old else None
        return {**inputs, key: kept or f"{name}-{secrets.token_hex(4)[:7]}"}

    def create(self, type_token: str, inputs: Inputs) -> Created:
        """Make the resource."""
        return self._handler(type_token).create(self._cloud, inputs)

    def update(
        self, type_token: str, id_: str, inputs: Inputs, changed: tuple[str, ...], outputs: dict[str, Any]
    ) -> dict[str, Any]:
        """Change the resource in place."""
        handler = self._handler(type_token)
        if handler.update is not None:
            return handler.update(self._cloud, id_, inputs, changed, outputs)
        if handler.put_again:
            return handler.create(self._cloud, inputs)[1]
        raise NotImplementedError(f"the test engine cannot change {', '.join(changed)} of {type_token}")

    def delete(self, type_token: str, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
        """Delete the resource."""
        handler = self._handler(type_token)
        if handler.delete is not None:
            handler.delete(self._cloud, id_, inputs, outputs)

    def invoke(self, token: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """The one function that the program calls."""
        if token != "aws:index/getCallerIdentity:getCallerIdentity":
            raise NotImplementedError(f"the test engine has no function {token}")
        answer = self._cloud.client("sts").get_caller_identity()
        return {"accountId": answer["Account"], "arn": answer["Arn"], "id": answer["Account"], "userId": "test"}
