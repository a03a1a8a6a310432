"""Instance types, interfaces, placement and images."""

from __future__ import annotations

import difflib
import re

from infra.catalogue import InstanceType, efa_layout, instance_types
from infra.config import ClusterConfig
from infra.findings import Finding, error, warning

P4_FAMILIES = ("p4d", "p4de")
DLAMI_MIN_GIB = 75


def known_type(key: str, name: str) -> list[Finding]:
    """A finding where the catalogue does not have the type."""
    if name in instance_types():
        return []
    near = difflib.get_close_matches(name, instance_types(), n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return [error(key, f"{name!r} is not in the catalogue", f"{hint}known: {', '.join(instance_types())}")]


def check(config: ClusterConfig) -> list[Finding]:
    """Findings about types, interfaces, placement and images."""
    findings = known_type("instanceType", config.instance_type) + known_type(
        "headInstanceType", config.head_instance_type
    )
    if config.elastic_instance_type:
        findings += known_type("elasticInstanceType", config.elastic_instance_type)
    types = instance_types()
    if config.instance_type in types:
        findings += _interfaces(config, types[config.instance_type])
    if config.elastic_max and {config.instance_type, config.elastic_type} <= set(types):
        findings += _mixture(config, types[config.instance_type], types[config.elastic_type])
    return findings + _images(config)


def _interfaces(config: ClusterConfig, item: InstanceType) -> list[Finding]:
    findings: list[Finding] = []
    if config.efa == "always" and item.efa_max == 0:
        findings.append(error("efa", f"{item.name} has no EFA", "choose a type with EFA, or efa: auto"))
    if config.gpu_public_ip:
        findings += _public_address(config, item)
    if config.use_placement_group and config.placement_group == "always" and not item.cluster_placement:
        findings.append(
            error("placementGroup", f"{item.name} cannot enter a cluster placement group", "set placementGroup: never")
        )
    if config.efa == "never" and item.efa_max > 0 and config.max_nodes > 1:
        findings.append(
            warning("efa", f"{item.name} would talk over TCP only", "set efa: auto unless you measure TCP on purpose")
        )
    if config.node_count > 1 and config.efa != "never" and item.efa_max > 0 and not config.use_placement_group:
        if config.capacity == "capacity-block":
            return findings
        findings.append(warning("placementGroup", "EFA nodes may land far from each other", "set placementGroup: auto"))
    return findings


def _public_address(config: ClusterConfig, item: InstanceType) -> list[Finding]:
    count = len(efa_layout(item, efa=config.efa != "never"))
    if len(item.cards) > 1 and count > 1:
        return [
            error(
                "gpuPublicIp",
                f"{item.name} starts with {count} interfaces; EC2 gives a public address only to an instance with one",
                "use the private subnet (gpuPublicIp: false) and reach nodes through the head",
            )
        ]
    return []


def _mixture(config: ClusterConfig, fixed: InstanceType, elastic: InstanceType) -> list[Finding]:
    if fixed.name == elastic.name:
        return []
    findings: list[Finding] = []
    families = {fixed.family in P4_FAMILIES, elastic.family in P4_FAMILIES}
    if config.efa != "never" and fixed.efa_max and elastic.efa_max and len(families) == 2:
        findings.append(
            error(
                "elasticInstanceType",
                f"EFA of {fixed.name} and {elastic.name} cannot talk to each other (P4 only speaks to P4)",
                "use one family, or two clusters",
            )
        )
    if bool(fixed.efa_max) != bool(elastic.efa_max) and config.efa != "never":
        findings.append(
            error(
                "elasticInstanceType",
                f"one of {fixed.name} and {elastic.name} has EFA, the other has none",
                "use types that both have EFA, or efa: never",
            )
        )
    if config.gpu_public_ip:
        findings += [
            error("elasticInstanceType", found.cause, found.remedy) for found in _public_address(config, elastic)
        ]
    if config.use_placement_group:
        findings.append(
            warning(
                "elasticInstanceType",
                "two types in one cluster placement group often end in insufficient capacity",
                "use one type in a group",
            )
        )
    return findings


def _images(config: ClusterConfig) -> list[Finding]:
    findings: list[Finding] = []
    for key, text in (("amiId", config.ami_id), ("headAmiId", config.head_ami_id)):
        if text and not re.fullmatch(r"ami-([0-9a-f]{8}|[0-9a-f]{17})", text):
            findings.append(error(key, f"{text!r} is not an image id", "use ami- and 17 hexadecimal digits"))
    if config.ami_parameter and not config.ami_parameter.startswith("/"):
        findings.append(
            error("amiParameter", f"{config.ami_parameter!r} is not a parameter path", "use /aws/service/.../ami-id")
        )
    item = instance_types().get(config.instance_type)
    if item and item.has_gpu and config.root_volume_gib < DLAMI_MIN_GIB:
        findings.append(
            error(
                "rootVolumeGib",
                f"{config.root_volume_gib} GiB is less than the Deep Learning AMI's snapshot ({DLAMI_MIN_GIB})",
                "use 200 or more",
            )
        )
    if config.node_updates == "replace":
        findings.append(
            warning(
                "nodeUpdates", "this `up` may replace running nodes", "set it back to keep when the roll-out is done"
            )
        )
    return findings
