"""What the account and the region offer, read through boto3 before anything is built.

Only reads (Describe*, Get*). Pulumi's own invokes are not used for this, because a failed invoke ends the whole
program, and one missing right or one unknown quota must not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

from infra.catalogue import InstanceType, instance_types
from infra.config import ClusterConfig

Result = TypeVar("Result")
Client: TypeAlias = Any  # boto3 makes the methods of a client at run time

UBUNTU_PARAMETERS = ("/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id",)
# AWS documents the name with and without "-gpu"; both are tried, the newer Ubuntu first.
GPU_PARAMETERS = tuple(
    f"/aws/service/deeplearning/ami/x86_64/{name}-ubuntu-{release}/latest/ami-id"
    for release in ("24.04", "22.04")
    for name in ("base-oss-nvidia-driver-gpu", "base-oss-nvidia-driver")
)
BAD_CREDENTIALS = (
    "AuthFailure",
    "ExpiredToken",
    "InvalidClientTokenId",
    "RequestExpired",
    "UnrecognizedClientException",
)
SPOT_P_CODES = {"p4d": ("L-7212CCBC",), "p4de": ("L-7212CCBC",), "p5": ("L-C4BD4855", "L-7212CCBC")}
FAMILY_CODES = {"p": ("L-417A185B",), "g": ("L-DB2E81BA",), "standard": ("L-1216C47A",)}
SPOT_CODES = {"g": ("L-3819A6DF",), "standard": ("L-34B43A08",)}


@dataclass(frozen=True)
class Image:
    """One machine image. `boot_mode` is legacy-bios, uefi or uefi-preferred; `root_gib` the size of its snapshot."""

    image_id: str
    architecture: str
    boot_mode: str
    root_gib: int


@dataclass(frozen=True)
class AccountFacts:
    """What could be read. `unread` names what could not, with the reason; absent entries mean the same.

    `no_entry` is the reason why AWS let us in nowhere (no or expired credentials), else empty.
    """

    zones: tuple[str, ...] = ()
    offered_zones: dict[str, tuple[str, ...]] = field(default_factory=dict)
    quotas_vcpus: dict[str, float] = field(default_factory=dict)
    gpu_image: Image | None = None
    head_image: Image | None = None
    unread: tuple[str, ...] = ()
    no_entry: str = ""


def quota_codes(item: InstanceType, *, spot: bool) -> tuple[str, ...]:
    """Service quota codes that limit this type, in the order to try; empty where none is known (spot P6)."""
    group = {"p": "p", "g": "g"}.get(item.name[0], "standard")
    if not spot:
        return FAMILY_CODES[group]
    if group == "p":
        return SPOT_P_CODES.get(item.family, SPOT_P_CODES["p5"] if item.family.startswith("p5") else ())
    return SPOT_CODES[group]


def types_of(config: ClusterConfig) -> list[str]:
    """The distinct instance types that the cluster starts."""
    names = [config.instance_type, config.head_instance_type]
    if config.elastic_max:
        names.append(config.elastic_type)
    return list(dict.fromkeys(names))


def pick_zone(config: ClusterConfig, facts: AccountFacts) -> str:
    """The availability zone of the cluster: the configured one, or the first that offers every type; may be empty."""
    if config.availability_zone:
        return config.availability_zone
    offers = [set(facts.offered_zones.get(name, ())) for name in types_of(config)]
    common = set.intersection(*offers) if offers else set()
    return min(common, default="")


class _Reader:
    """Runs reads and keeps the reason of each that fails."""

    def __init__(self) -> None:
        self.unread: list[str] = []
        self.no_entry = ""

    def attempt(self, what: str, read: Callable[[], Result], otherwise: Result) -> Result:
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, ProfileNotFound

        try:
            return read()
        except (NoCredentialsError, ProfileNotFound) as fault:
            self.no_entry = str(fault)
            return otherwise
        except (BotoCoreError, ClientError) as fault:
            code = fault.response["Error"]["Code"] if isinstance(fault, ClientError) else ""
            if code in BAD_CREDENTIALS:
                self.no_entry = str(fault)
                return otherwise
            self.unread.append(f"{what}: {fault}")
            return otherwise


def read_account(config: ClusterConfig) -> AccountFacts:
    """Read zones, offerings, quotas and images. Never raises for a refused or failed read; see `unread`."""
    import boto3
    from botocore.config import Config

    settings = Config(connect_timeout=5, read_timeout=20, retries={"max_attempts": 3, "mode": "standard"})
    reader = _Reader()
    session = reader.attempt(
        "profile", lambda: boto3.Session(profile_name=config.profile or None, region_name=config.region), None
    )
    if session is None:
        return AccountFacts(no_entry=reader.no_entry, unread=tuple(reader.unread))
    ec2, ssm, quotas = (session.client(name, config=settings) for name in ("ec2", "ssm", "service-quotas"))
    names = types_of(config)
    item = instance_types()[config.instance_type]
    gpu_parameters = GPU_PARAMETERS if item.has_gpu else UBUNTU_PARAMETERS
    facts = AccountFacts(
        zones=reader.attempt("availability zones", lambda: _zones(ec2), ()),
        offered_zones=reader.attempt("instance type offerings", lambda: _offerings(ec2, names), {}),
        quotas_vcpus=_quotas(quotas, config, reader),
        gpu_image=_image(
            ec2, ssm, config.ami_id, [config.ami_parameter] if config.ami_parameter else gpu_parameters, reader
        ),
        head_image=_image(ec2, ssm, config.head_ami_id, UBUNTU_PARAMETERS, reader),
    )
    return replace(facts, unread=tuple(reader.unread), no_entry=reader.no_entry)


def _zones(ec2: Client) -> tuple[str, ...]:
    answer: dict[str, Any] = ec2.describe_availability_zones(Filters=[{"Name": "state", "Values": ["available"]}])
    return tuple(sorted(zone["ZoneName"] for zone in answer["AvailabilityZones"]))


def _offerings(ec2: Client, names: list[str]) -> dict[str, tuple[str, ...]]:
    pages = ec2.get_paginator("describe_instance_type_offerings").paginate(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": names}]
    )
    found: dict[str, set[str]] = {name: set() for name in names}
    for page in pages:
        for offer in page["InstanceTypeOfferings"]:
            found[offer["InstanceType"]].add(offer["Location"])
    return {name: tuple(sorted(zones)) for name, zones in found.items()}


def _quotas(client: Client, config: ClusterConfig, reader: _Reader) -> dict[str, float]:
    codes: dict[str, None] = {}
    if config.capacity != "capacity-block":
        for name in types_of(config):
            spot = config.capacity == "spot" and name != config.head_instance_type
            codes.update(dict.fromkeys(quota_codes(instance_types()[name], spot=spot)))

    def value(code: str) -> float | None:
        answer = client.get_service_quota(ServiceCode="ec2", QuotaCode=code)
        return float(answer["Quota"]["Value"])

    read = {code: reader.attempt(f"quota {code}", lambda code=code: value(code), None) for code in codes}  # type: ignore[misc]
    return {code: limit for code, limit in read.items() if limit is not None}


def _image(ec2: Client, ssm: Client, pinned: str, parameters: Iterable[str], reader: _Reader) -> Image | None:
    image_id = pinned or reader.attempt("image parameter", lambda: _parameter(ssm, tuple(parameters)), "")
    if not image_id:
        return None
    return reader.attempt(f"image {image_id}", lambda: _describe_image(ec2, image_id), None)


def _parameter(ssm: Client, names: tuple[str, ...]) -> str:
    answer: dict[str, Any] = ssm.get_parameters(Names=list(names))
    found = {entry["Name"]: entry["Value"] for entry in answer["Parameters"]}
    return next((str(found[name]) for name in names if name in found), "")


def _describe_image(ec2: Client, image_id: str) -> Image | None:
    images = ec2.describe_images(ImageIds=[image_id])["Images"]
    if not images:
        return None
    image = images[0]
    disks = [mapping["Ebs"] for mapping in image.get("BlockDeviceMappings", []) if "Ebs" in mapping]
    return Image(
        image_id=image_id,
        architecture=image.get("Architecture", "x86_64"),
        boot_mode=image.get("BootMode", "legacy-bios"),
        root_gib=int(disks[0].get("VolumeSize", 0)) if disks else 0,
    )
