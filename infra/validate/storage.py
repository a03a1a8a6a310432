"""Shared file systems: the combinations that FSx for Lustre takes, from its API model and guide."""

from __future__ import annotations

from infra.catalogue import instance_types
from infra.config import ClusterConfig
from infra.findings import Finding, error, warning

THROUGHPUTS = {"SCRATCH_2": (0,), "PERSISTENT_1": (50, 100, 200), "PERSISTENT_2": (125, 250, 500, 1000)}
EFA_STEP_GIB = {125: 38400, 250: 19200, 500: 9600, 1000: 4800}
METADATA_IOPS = (1500, 3000, 6000, *range(12000, 192001, 12000))
VERSIONS = {
    "SCRATCH_2": ("2.10", "2.12", "2.15"),
    "PERSISTENT_1": ("2.10", "2.12", "2.15"),
    "PERSISTENT_2": ("2.12", "2.15"),
}
FSX_EFA_FAMILIES = ("p5", "p5e", "p5en", "p6-b200", "p6-b300", "g6e")  # clients from the fourth Nitro generation on


def check(config: ClusterConfig) -> list[Finding]:
    """Findings about shared storage."""
    if config.shared_storage == "fsx-lustre":
        return _capacity(config) + _version_and_efa(config) + _metadata(config) + _s3_link(config)
    findings: list[Finding] = []
    if config.fsx_efa:
        findings.append(error("fsxEfa", f"sharedStorage is {config.shared_storage}", "set sharedStorage: fsx-lustre"))
    if config.shared_storage == "none" and config.max_nodes > 1:
        findings.append(
            warning(
                "sharedStorage", "several nodes without shared storage", "copy data to every node, or set a storage"
            )
        )
    if config.shared_storage in ("efs", "nfs") and config.max_nodes > 8:
        findings.append(
            warning(
                "sharedStorage",
                f"{config.max_nodes} nodes on {config.shared_storage}",
                "use fsx-lustre for training data",
            )
        )
    return findings


def _capacity(config: ClusterConfig) -> list[Finding]:
    deployment, throughput, capacity = config.fsx_deployment, config.fsx_throughput, config.fsx_capacity_gib
    findings: list[Finding] = []
    allowed = THROUGHPUTS[deployment]
    if throughput not in allowed:
        findings.append(
            error(
                "fsxThroughput",
                f"{deployment} does not take {throughput} MB/s per TiB",
                f"use {', '.join(map(str, allowed))}",
            )
        )
    if capacity not in (1200, 2400) and (capacity < 2400 or capacity % 2400):
        below, above = max(1200, capacity // 2400 * 2400), max(2400, (capacity // 2400 + 1) * 2400)
        findings.append(
            error(
                "fsxCapacityGib",
                f"{capacity} GiB is not a size of FSx for Lustre",
                f"use 1200, 2400 or a multiple of 2400, for example {below} or {above}",
            )
        )
    step = EFA_STEP_GIB.get(throughput)
    if config.fsx_efa and step and (capacity <= 0 or capacity % step):
        findings.append(
            error(
                "fsxCapacityGib",
                f"with EFA at {throughput} MB/s per TiB the size must be a multiple of {step} GiB, not {capacity}",
                f"use {max(step, -(-capacity // step) * step)}",
            )
        )
    return findings


def _version_and_efa(config: ClusterConfig) -> list[Finding]:
    deployment = config.fsx_deployment
    findings: list[Finding] = []
    if config.fsx_version not in VERSIONS[deployment]:
        findings.append(
            error(
                "fsxVersion",
                f"{deployment} does not take Lustre {config.fsx_version}",
                f"use {', '.join(VERSIONS[deployment])}; 2.15 for current clients",
            )
        )
    elif config.fsx_version != "2.15":
        findings.append(
            warning("fsxVersion", f"clients of current images refuse {config.fsx_version} servers", "use 2.15")
        )
    if config.fsx_efa and (deployment != "PERSISTENT_2" or config.fsx_metadata_iops == 0):
        findings.append(
            error(
                "fsxEfa",
                "needs PERSISTENT_2 and provisioned metadata IOPS, and cannot be changed later",
                "set fsxDeployment: PERSISTENT_2 and fsxMetadataIops (from 1500)",
            )
        )
    item = instance_types().get(config.instance_type)
    if config.fsx_efa and item and item.family not in FSX_EFA_FAMILIES:
        findings.append(
            warning("fsxEfa", f"{item.name} would mount it over TCP", "EFA to FSx is for P5, P6 and g6e nodes")
        )
    return findings


def _metadata(config: ClusterConfig) -> list[Finding]:
    findings: list[Finding] = []
    if config.fsx_metadata_iops and config.fsx_metadata_iops not in METADATA_IOPS:
        findings.append(
            error(
                "fsxMetadataIops",
                f"{config.fsx_metadata_iops} is not a step",
                "use 1500, 3000, 6000 or a multiple of 12000 up to 192000",
            )
        )
    if config.fsx_metadata_iops and config.fsx_deployment != "PERSISTENT_2":
        findings.append(
            error("fsxMetadataIops", f"{config.fsx_deployment} has none", "set it to 0, or use PERSISTENT_2")
        )
    return findings


def _s3_link(config: ClusterConfig) -> list[Finding]:
    deployment = config.fsx_deployment
    findings: list[Finding] = []
    if config.fsx_s3_prefix and deployment == "PERSISTENT_1":
        findings.append(
            error(
                "fsxS3Prefix",
                "PERSISTENT_1 takes no data repository association",
                "use PERSISTENT_2 or SCRATCH_2, or clear fsxS3Prefix",
            )
        )
    if config.fsx_s3_prefix.startswith("/") or config.fsx_s3_prefix.endswith("/"):
        findings.append(error("fsxS3Prefix", "begins or ends with a slash", "write it like data or team/data"))
    if not config.fsx_s3_prefix and deployment == "SCRATCH_2":
        findings.append(
            warning("fsxS3Prefix", "nothing leaves this scratch file system", "set a prefix, so that results reach S3")
        )
    return findings
