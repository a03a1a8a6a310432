"""Checks of a configuration before anything is created.

`check_config` needs the configuration and the catalogue only; `check_account` compares it with what the account and
the region offer. Both return every finding at once; neither calls AWS.
"""

from __future__ import annotations

import datetime as dt

from infra.account import AccountFacts
from infra.config import ClusterConfig
from infra.findings import Finding
from infra.validate import access, account, capacity, compute, names, network, storage


def check_config(config: ClusterConfig, *, now: dt.datetime) -> list[Finding]:
    """Everything that can be told from the configuration alone. `now` is timezone-aware and decides about blocks."""
    findings = names.check(config)
    findings += network.check(config)
    findings += access.check(config)
    findings += compute.check(config)
    findings += capacity.check(config, now=now)
    findings += storage.check(config)
    return findings


def check_account(config: ClusterConfig, facts: AccountFacts) -> list[Finding]:
    """What the account's quotas, zones and images say about a configuration that passed `check_config`."""
    return account.check(config, facts)
