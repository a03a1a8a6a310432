"""Names: they end up in host names, role names, bucket names and tags, each with a limit of its own."""

from __future__ import annotations

import re

from infra.config import ClusterConfig
from infra.findings import Finding, error, warning

# The longest name we build is the IAM role "NAME-flow-logs-XXXXXXX" (64); host names "NAME-gpu-0001" must stay below
# 64 (RFC 1123); bucket "NAME-checkpoints-ACCOUNT12-REGION" below 64. 24 keeps all of them.
MAX_NAME = 24
REGION = re.compile(r"[a-z]{2}-[a-z]+-\d")
# Parameter Store keeps aws and ssm, security groups sg-, S3 the rest for itself.
RESERVED_PREFIXES = ("aws", "ssm", "sg-", "xn--", "sthree-", "amzn-s3-demo-")
BUCKET = re.compile(r"(?!xn--|sthree-|\d+\.\d+\.\d+\.\d+$)[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")


def check(config: ClusterConfig) -> list[Finding]:
    """Findings about the names in the configuration."""
    findings = _cluster_name(config) + _bucket_name(config)
    if not REGION.fullmatch(config.region) or config.region.startswith("cn-"):
        findings.append(
            error(
                "aws:region",
                f"{config.region!r} is not a region of the commercial partition",
                "set it like us-east-1; the ARNs here are not those of GovCloud or China",
            )
        )
    if not config.owner:
        findings.append(warning("owner", "nobody is named in the tags", "set owner, so that others know whom to ask"))
    if not re.fullmatch(r"/[A-Za-z0-9._/-]*[A-Za-z0-9]", config.mount_point):
        findings.append(
            error("mountPoint", f"{config.mount_point!r} is not an absolute path", "use a path such as /shared")
        )
    return findings


def _cluster_name(config: ClusterConfig) -> list[Finding]:
    findings: list[Finding] = []
    if not re.fullmatch(r"[a-z][a-z0-9-]*[a-z0-9]", config.name) or "--" in config.name:
        findings.append(
            error(
                "name",
                f"{config.name!r} is not usable in host and bucket names",
                "use lower-case letters, digits and single hyphens; begin with a letter",
            )
        )
    if not 3 <= len(config.name) <= MAX_NAME:
        findings.append(
            error("name", f"{config.name!r} has {len(config.name)} characters", f"use 3 to {MAX_NAME} characters")
        )
    if config.name.startswith(RESERVED_PREFIXES):
        findings.append(
            error("name", f"{config.name!r} begins with a word that AWS keeps", f"avoid {', '.join(RESERVED_PREFIXES)}")
        )
    return findings


def _bucket_name(config: ClusterConfig) -> list[Finding]:
    findings: list[Finding] = []
    if config.checkpoint_bucket and not BUCKET.fullmatch(config.checkpoint_bucket):
        findings.append(
            error(
                "checkpointBucket",
                f"{config.checkpoint_bucket!r} is not a bucket name",
                "use 3 to 63 lower-case letters, digits and hyphens",
            )
        )
    if config.checkpoint_bucket.endswith(("-s3alias", "--ol-s3", "--x-s3")):
        findings.append(
            error("checkpointBucket", "the suffix is reserved by S3", "choose a name without -s3alias, --ol-s3, --x-s3")
        )
    return findings
