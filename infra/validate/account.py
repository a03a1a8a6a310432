"""The configuration against the account: zones, quotas, images."""

from __future__ import annotations

from infra.account import AccountFacts, Image, pick_zone, quota_codes, types_of
from infra.catalogue import InstanceType, instance_types
from infra.config import ClusterConfig
from infra.findings import Finding, error, warning

QUOTA_REMEDY = "request an increase in Service Quotas (days for P types), choose fewer nodes, or a capacity block"


def check(config: ClusterConfig, facts: AccountFacts) -> list[Finding]:
    """Findings about zones, quotas and images. What could not be read becomes one warning each."""
    if facts.no_entry:
        remedy = (
            "log in (`aws sso login`, `aws configure`), or set aws:profile; `aws sts get-caller-identity` must answer"
        )
        return [error("aws:profile", f"AWS does not let us in: {facts.no_entry}", remedy)]
    findings = [
        warning("accountChecks", f"could not read {what}", "grant the read right, or check it by hand")
        for what in facts.unread
    ]
    findings += _zone(config, facts)
    findings += _quotas(config, facts)
    item = instance_types()[config.instance_type]
    findings += _image("amiId", config.ami_id, facts.gpu_image, item, config.root_volume_gib)
    head = instance_types()[config.head_instance_type]
    findings += _image("headAmiId", config.head_ami_id, facts.head_image, head, config.head_volume_gib)
    return findings


def _zone(config: ClusterConfig, facts: AccountFacts) -> list[Finding]:
    zone = config.availability_zone
    if zone and facts.zones and zone not in facts.zones:
        return [error("availabilityZone", f"{zone} is not available", f"this account has {', '.join(facts.zones)}")]
    findings: list[Finding] = []
    for name in types_of(config):
        offered = facts.offered_zones.get(name)
        if offered is None:
            continue
        if not offered:
            findings.append(
                error("instanceType", f"{config.region} does not offer {name}", "choose another region or type")
            )
        elif zone and zone not in offered:
            findings.append(
                error("availabilityZone", f"{zone} does not offer {name}", f"use one of {', '.join(offered)}")
            )
    if not findings and not pick_zone(config, facts):
        findings.append(
            error(
                "availabilityZone",
                f"no zone is known to offer {' and '.join(types_of(config))} together",
                "set availabilityZone, or choose types that share a zone",
            )
        )
    return findings


def vcpus_needed(config: ClusterConfig) -> dict[tuple[str, ...], int]:
    """vCPUs by tuple of quota codes that can cover them. The head counts as on demand, the nodes by `capacity`."""
    types = instance_types()
    spot = config.capacity == "spot"
    counts = [(config.head_instance_type, 1, False)]
    if config.capacity != "capacity-block":
        counts += [(config.instance_type, config.node_count, spot), (config.elastic_type, config.elastic_max, spot)]
    need: dict[tuple[str, ...], int] = {}
    for name, count, is_spot in counts:
        codes = quota_codes(types[name], spot=is_spot)
        need[codes] = need.get(codes, 0) + types[name].vcpus * count
    return {codes: vcpus for codes, vcpus in need.items() if vcpus}


def _quotas(config: ClusterConfig, facts: AccountFacts) -> list[Finding]:
    findings: list[Finding] = []
    for codes, need in vcpus_needed(config).items():
        if not codes:
            findings.append(
                warning("capacity", "the spot quota code of this family is not known", "look it up in Service Quotas")
            )
            continue
        code = next((code for code in codes if code in facts.quotas_vcpus), "")
        if code and facts.quotas_vcpus[code] < need:
            have = int(facts.quotas_vcpus[code])
            findings.append(
                error("nodeCount", f"needs {need} vCPUs of quota {code}, the account has {have}", QUOTA_REMEDY)
            )
    return findings


def _image(key: str, pinned: str, image: Image | None, item: InstanceType, volume_gib: int) -> list[Finding]:
    if image is None and pinned:
        return [warning(key, f"{pinned} could not be looked at", "check its architecture and boot mode by hand")]
    if image is None:
        return [error(key, "no image could be found", f"set {key} to an image of this region")]
    findings: list[Finding] = []
    if image.architecture != item.architecture:
        findings.append(
            error(
                key,
                f"{image.image_id} is {image.architecture}, {item.name} is {item.architecture}",
                "pick a fitting image",
            )
        )
    if image.boot_mode == "uefi" and "uefi" not in item.boot_modes:
        findings.append(
            error(
                key,
                f"{image.image_id} boots by UEFI only, {item.name} by {', '.join(item.boot_modes)} only",
                "pick an image with boot mode legacy-bios or uefi-preferred",
            )
        )
    if image.boot_mode == "legacy-bios" and "legacy-bios" not in item.boot_modes:
        findings.append(error(key, f"{image.image_id} needs legacy BIOS, {item.name} has none", "pick a UEFI image"))
    if image.root_gib > volume_gib:
        volume_key = "rootVolumeGib" if key == "amiId" else "headVolumeGib"
        findings.append(
            error(
                volume_key,
                f"{volume_gib} GiB is less than the image's {image.root_gib} GiB",
                f"use {image.root_gib} or more",
            )
        )
    return findings
