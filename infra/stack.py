"""From the stack's configuration to a checked one, and what the program says about money and data."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

import pulumi
from pulumi.runtime import config as pulumi_config

from infra.account import AccountFacts, pick_zone, read_account
from infra.config import PROJECT, ClusterConfig, from_strings
from infra.cost import estimate, summary
from infra.findings import Finding, InfraError, errors_of
from infra.validate import check_account, check_config


@dataclass(frozen=True)
class Choice:
    """What was looked up for this run: zone and images."""

    zone: str
    gpu_image_id: str
    head_image_id: str


def read_configuration() -> ClusterConfig:
    """The configuration of the running stack.

    All keys of our namespace are taken, so that one which no field knows is named. The secret is plain text here,
    because it is checked; it enters resources and outputs as a Pulumi secret (infra/secrets_store.py, outputs.py).
    """
    project = f"{pulumi.get_project()}:"
    raw = {
        key.replace(project, f"{PROJECT}:", 1): value
        for key, value in {**pulumi_config.get_config_env(), **pulumi_config.CONFIG.get()}.items()
        if key.startswith((project, "aws:"))
    }
    return from_strings(raw)


def checked_configuration(now: dt.datetime) -> tuple[ClusterConfig, Choice]:
    """Read, check and complete the configuration before any resource is registered.

    Raises pulumi.RunError with every finding at once; warnings are logged.
    """
    try:
        config = read_configuration()
        findings = check_config(config, now=now)
        _stop_on_errors(findings)
        facts = read_account(config) if config.account_checks else AccountFacts()
        if config.account_checks:
            findings += check_account(config, facts)
            _stop_on_errors(findings)
        choice = choose(config, facts)
    except InfraError as fault:
        raise pulumi.RunError(str(fault)) from None
    for finding in findings:
        pulumi.log.warn(str(finding))
    return config, choice


def choose(config: ClusterConfig, facts: AccountFacts) -> Choice:
    """Zone and images from the configuration, completed by what was read. Raises InfraError where one is missing."""
    gpu = config.ami_id or (facts.gpu_image.image_id if facts.gpu_image else "")
    head = config.head_ami_id or (facts.head_image.image_id if facts.head_image else "")
    choice = Choice(zone=pick_zone(config, facts), gpu_image_id=gpu, head_image_id=head)
    values = {"availabilityZone": choice.zone, "amiId": gpu, "headAmiId": head}
    missing = [key for key, value in values.items() if not value]
    if missing:
        raise InfraError(
            Finding("error", key, "is not set, and accountChecks is off, so nobody looked it up", "set it")
            for key in missing
        )
    return choice


def _stop_on_errors(findings: list[Finding]) -> None:
    if errors_of(findings):
        raise InfraError(findings)


def announce(config: ClusterConfig) -> None:
    """Say what it will cost and what destroy will do with the data."""
    pulumi.log.info(summary(estimate(config, today=dt.date.today())))
    if config.data_on_destroy == "keep":
        pulumi.log.info(
            "The checkpoint bucket is protected: `pulumi destroy` stops at it; `pulumi destroy --exclude-protected` "
            "removes everything else and keeps it. To delete it with its content set dataOnDestroy: purge and run "
            "`pulumi up` first."
        )
    else:
        pulumi.log.warn("dataOnDestroy is purge: `pulumi destroy` deletes the checkpoint bucket with its content.")
