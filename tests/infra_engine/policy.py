"""Run the policy pack's rules over what a run of the engine registered, in preview or apply, without the CLI."""

from __future__ import annotations

from pulumi_policy import (
    PolicyCustomTimeouts,
    PolicyResource,
    PolicyResourceOptions,
    ResourceValidationArgs,
    StackValidationArgs,
)

from infra.policies.resource_rules import RESOURCE_POLICIES
from infra.policies.stack_rules import STACK_POLICIES
from tests.infra_engine.engine import Result
from tests.infra_engine.wire import decode, reveal


def policy_resources(result: Result) -> list[PolicyResource]:
    """The registered resources in the form that policies read, linked by their dependencies."""
    found: dict[str, PolicyResource] = {}
    for urn, request in result.requests.items():
        options = PolicyResourceOptions(
            protect=request.protect,
            ignore_changes=list(request.ignoreChanges),
            delete_before_replace=request.deleteBeforeReplace,
            aliases=[],
            custom_timeouts=PolicyCustomTimeouts(0, 0, 0),
            additional_secret_outputs=[],
        )
        props = reveal(decode(request.object))
        found[urn] = PolicyResource(request.type, props, urn, request.name, options, None, None, [], {})
    for urn, request in result.requests.items():
        for key, targets in request.propertyDependencies.items():
            found[urn].property_dependencies[key] = [found[target] for target in targets.urns if target in found]
    return list(found.values())


def violations(resources: list[PolicyResource]) -> list[str]:
    """Everything that the pack would report, as `policy: message`."""
    reports: list[str] = []
    for policy in RESOURCE_POLICIES:
        for resource in resources:
            arguments = ResourceValidationArgs(
                resource.resource_type, resource.props, resource.urn, resource.name, resource.opts, None
            )
            policy.validate(arguments, lambda message, urn=None, name=policy.name: reports.append(f"{name}: {message}"))
    for stack_policy in STACK_POLICIES:
        stack_policy.validate(
            StackValidationArgs(resources),
            lambda message, urn=None, name=stack_policy.name: reports.append(f"{name}: {message}"),
        )
    return reports
