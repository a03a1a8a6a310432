"""The queue's password: from an encrypted configuration value into Parameter Store, readable by the head alone."""

from __future__ import annotations

import pulumi
import pulumi_aws as aws

from infra.components import Access
from infra.components.naming import Naming
from infra.config import ClusterConfig
from infra.outputs import parameter_policy


def store_redis_password(config: ClusterConfig, access: Access) -> pulumi.Output[str] | None:
    """Make the SecureString parameter and return its name; None where no password is set."""
    if not config.redis_password:
        return None
    naming = Naming.of(config)
    parameter = aws.ssm.Parameter(
        naming.name("redis-password"),
        name=f"/{config.name}/redis/password",
        description=f"Redis password of {config.name}",
        type="SecureString",
        value=pulumi.Output.secret(config.redis_password),
        tags=naming.tags("redis-password"),
    )
    access.allow_head("redis", parameter.arn.apply(parameter_policy))
    name: pulumi.Output[str] = parameter.name
    return name
