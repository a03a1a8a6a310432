"""The cluster configuration: one frozen model, read from a Pulumi stack file or from `pulumi.Config`.

Keys are written in camelCase in Pulumi.yaml and Pulumi.STACK.yaml, as Pulumi does. This model is the source of the
`config:` block of Pulumi.yaml (`python -m infra.config` prints that file; a test keeps them equal). Needs no Pulumi.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from infra.findings import Finding, InfraError, error

PROJECT = "loopworks"
SECRET_KEYS = ("redisPassword",)
AWS_KEYS = ("region", "profile")

PROJECT_HEADER = f"""\
name: {PROJECT}
description: GPU cluster on AWS for training a recurrent-depth language model
runtime:
  name: python
  options:
    toolchain: pip
# The stack also needs aws:region, and takes the secret redisPassword:
#   pulumi config set aws:region us-east-1
#   pulumi config set --secret redisPassword "$(openssl rand -hex 24)"
# Made by `python -m infra.config > infra/Pulumi.yaml`; each key is checked before anything is created.
"""

Capacity = Literal["on-demand", "spot", "reservation", "capacity-block"]
Storage = Literal["fsx-lustre", "efs", "nfs", "none"]
Use = Literal["auto", "always", "never"]


class ClusterConfig(BaseModel):
    """Everything that a person decides about the cluster. An empty string or list means: not set."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)

    name: str = Field("loopworks", description="Name of the cluster: part of every resource name, tag and host name")
    region: str = Field("us-east-1", description="AWS region (the key aws:region of the stack file)")
    profile: str = Field("", description="AWS profile (the key aws:profile of the stack file)")
    owner: str = Field("", description="Who to ask about this cluster; becomes the tag Owner")

    instance_type: str = Field("p4d.24xlarge", description="Type of the GPU nodes (infra/catalogue lists them)")
    node_count: int = Field(2, ge=0, le=1000, description="Fixed GPU nodes; changing it adds or removes nodes only")
    elastic_max: int = Field(
        0, ge=0, le=1000, description="Upper limit of the Auto Scaling group beside the fixed nodes"
    )
    elastic_instance_type: str = Field("", description="Type of the elastic nodes; empty is the same as instanceType")
    capacity: Capacity = Field("on-demand", description="on-demand, spot, reservation or capacity-block")
    reservation_id: str = Field(
        "", description="cr-...: existing reservation or block; empty with 'reservation' makes one"
    )
    capacity_block_offering_id: str = Field(
        "", description="cbr-...: a block to buy; paid at once, cannot be cancelled"
    )
    confirm_capacity_block_purchase: bool = Field(False, description="Must be true before a block is bought")
    capacity_block_start: str = Field("", description="Start of the block, RFC 3339 in UTC")
    capacity_block_end: str = Field("", description="End of the block, RFC 3339 in UTC; always at 11:30")
    efa: Use = Field("auto", description="auto attaches every EFA of the type; always refuses a type without; never")
    placement_group: Use = Field("auto", description="Cluster placement group; auto is on except for capacity blocks")
    gpu_public_ip: bool = Field(False, description="Public address for GPU nodes; possible with one interface only")
    node_updates: Literal["keep", "replace"] = Field(
        "keep", description="keep never replaces a running node; replace rolls a new template or image out"
    )

    ami_id: str = Field("", description="Pinned image of the GPU nodes; empty resolves it once and keeps it")
    ami_parameter: str = Field(
        "", description="SSM parameter of the image; empty picks the Deep Learning AMI or Ubuntu"
    )
    root_volume_gib: int = Field(200, ge=8, le=65536, description="Root disk of each GPU node, encrypted gp3")
    containers: bool = Field(True, description="Containers need the metadata service: IMDSv2 hop limit 2 instead of 1")

    head_instance_type: str = Field("m7i.large", description="Type of the head node: queue, monitoring, jump host")
    head_ami_id: str = Field("", description="Pinned image of the head node; empty resolves Ubuntu once and keeps it")
    head_volume_gib: int = Field(100, ge=8, le=65536, description="Root disk of the head node, encrypted gp3")
    head_public_ip: bool = Field(True, description="Elastic IP on the head, open to allowedCidrs; false: SSM only")

    vpc_cidr: str = Field("10.40.0.0/16", description="Address range of the VPC")
    gpu_subnet_cidr: str = Field("10.40.0.0/20", description="Private subnet of the GPU nodes, one availability zone")
    public_subnet_cidr: str = Field("10.40.240.0/24", description="Public subnet of NAT gateway and head")
    availability_zone: str = Field("", description="Zone; empty picks the first one that offers instanceType, once")
    nat_gateway: bool = Field(True, description="Way out for the private subnet")
    interface_endpoints: list[str] = Field([], description="VPC interface endpoints, for example ssm, ecr.api, logs")
    flow_logs: bool = Field(True, description="VPC flow logs to CloudWatch")
    log_retention_days: int = Field(30, description="How long flow logs are kept")

    allowed_cidrs: list[str] = Field([], description="Networks that may reach 22 and 8888 of the head")
    redis_cidrs: list[str] = Field([], description="Networks beside the VPC that may reach Redis (6379) on the head")
    ssh_public_key: str = Field("", description="Public key text; makes a key pair")
    key_name: str = Field("", description="Existing key pair instead of sshPublicKey")
    ssm: bool = Field(True, description="Session Manager access for all instances")
    ssh_user: str = Field("ubuntu", description="Login user of the images")

    shared_storage: Storage = Field("fsx-lustre", description="fsx-lustre, efs, nfs (disk on the head) or none")
    fsx_deployment: Literal["SCRATCH_2", "PERSISTENT_1", "PERSISTENT_2"] = Field(
        "PERSISTENT_2", description="FSx for Lustre deployment type, SSD"
    )
    fsx_capacity_gib: int = Field(1200, description="1200, 2400, then steps of 2400; larger steps with fsxEfa")
    fsx_throughput: int = Field(250, description="MB/s per TiB; 0 for SCRATCH_2")
    fsx_version: str = Field("2.15", description="Lustre version of the file system")
    fsx_efa: bool = Field(False, description="EFA between GPU nodes and the file system; fixed at creation")
    fsx_metadata_iops: int = Field(0, description="Provisioned metadata IOPS; 0 leaves it to FSx, needed with fsxEfa")
    fsx_s3_prefix: str = Field("data", description="Prefix of the bucket that appears in the file system and back")
    nfs_volume_gib: int = Field(500, ge=8, le=65536, description="Data disk of the head with sharedStorage nfs")
    mount_point: str = Field("/shared", description="Where nodes mount the shared storage")

    checkpoint_bucket: str = Field("", description="Bucket name; empty lets Pulumi make one from the name")
    checkpoint_noncurrent_days: int = Field(14, ge=1, description="Days that overwritten objects are kept")
    kms_key_arn: str = Field("", description="KMS key of bucket and file systems; empty uses AWS's own keys")
    data_on_destroy: Literal["keep", "purge"] = Field(
        "keep", description="keep protects the bucket and leaves it on destroy; purge deletes it with its content"
    )

    monthly_budget_usd: int = Field(0, ge=0, description="Budget of the cluster's tag; 0 makes none")
    alert_emails: list[str] = Field([], description="Who hears of budget, alarms, interruptions")
    account_checks: bool = Field(True, description="Read quotas, offerings and images of the account before building")
    redis_password: str = Field("", repr=False, description="Secret: set with `pulumi config set --secret`")

    @property
    def elastic_type(self) -> str:
        """Type of the elastic nodes."""
        return self.elastic_instance_type or self.instance_type

    @property
    def use_placement_group(self) -> bool:
        """Whether a cluster placement group is made: a capacity block brings its own placement."""
        if self.placement_group == "auto":
            return self.capacity != "capacity-block"
        return self.placement_group == "always"

    @property
    def max_nodes(self) -> int:
        """Fixed and elastic nodes together."""
        return self.node_count + self.elastic_max


def camel_keys() -> list[str]:
    """All keys as they stand in a stack file."""
    return [to_camel(name) for name in ClusterConfig.model_fields]


def _as_finding(raw: Mapping[str, Any]) -> Finding:
    location = [str(part) for part in raw["loc"]]
    key = to_camel(location[0]) if location else "config"
    if raw["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, camel_keys(), n=1)
        hint = f"did you mean {near[0]}?" if near else "remove it; Pulumi.yaml lists the keys"
        return error(key, "unknown configuration key", hint)
    shown = "" if key in SECRET_KEYS else f" (got {raw['input']!r})"
    return error(key, f"{raw['msg']}{shown}", "see the key's description in infra/Pulumi.yaml")


def parse(values: Mapping[str, Any]) -> ClusterConfig:
    """A configuration from plain values by camelCase key.

    Raises InfraError with one finding for each value of the wrong type or range and each unknown key.
    """
    try:
        return ClusterConfig.model_validate(dict(values))
    except ValidationError as fault:
        raise InfraError(_as_finding(raw) for raw in fault.errors()) from None


def split_namespaces(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`loopworks:key`, `aws:region` and bare keys of a stack file as one mapping; other namespaces are left out."""
    values: dict[str, Any] = {}
    for full_key, value in raw.items():
        namespace, _, key = full_key.rpartition(":")
        if namespace in ("", PROJECT) or (namespace == "aws" and key in AWS_KEYS):
            values[key] = value
    return values


def load_stack_file(path: Path) -> ClusterConfig:
    """The configuration of a Pulumi.STACK.yaml. Secrets in it are encrypted and are left empty here.

    Raises InfraError where the file is missing or not YAML.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        raise InfraError([error("stack", f"no file {path}", "name a stack that has a Pulumi.STACK.yaml")]) from None
    except yaml.YAMLError as fault:
        raise InfraError([error("stack", f"{path} is not YAML: {fault}", "correct the file")]) from None
    values = split_namespaces(document.get("config") or {})
    return parse({key: value for key, value in values.items() if not _is_encrypted(value)})


def _is_encrypted(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"secure"}


def from_strings(raw: Mapping[str, str]) -> ClusterConfig:
    """A configuration from the engine's form, where every value is text and lists are JSON."""
    values: dict[str, Any] = {}
    lists = {to_camel(name) for name, field in ClusterConfig.model_fields.items() if field.annotation == list[str]}
    for key, text in split_namespaces(raw).items():
        if key in lists and text.strip():
            try:
                values[key] = json.loads(text)
            except json.JSONDecodeError:
                values[key] = text
        elif text != "" or key not in lists:
            values[key] = text
    return parse(values)


def schema_block() -> dict[str, Any]:
    """The `config:` block of Pulumi.yaml. Every key has a default, since the CLI requires those without one."""
    names = {str: "string", int: "integer", bool: "boolean"}
    block: dict[str, Any] = {}
    for name, field in ClusterConfig.model_fields.items():
        key = to_camel(name)
        if key in AWS_KEYS or key in SECRET_KEYS:
            continue
        entry: dict[str, Any] = {"type": names.get(type(field.default), "array")}
        if entry["type"] == "array":
            entry["items"] = {"type": "string"}
        block[key] = {**entry, "default": field.default, "description": field.description}
    return block


def project_file() -> str:
    """The whole text of Pulumi.yaml."""
    return PROJECT_HEADER + yaml.safe_dump({"config": schema_block()}, sort_keys=False, width=110)


if __name__ == "__main__":
    print(project_file(), end="")
