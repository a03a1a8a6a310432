"""The policy pack's entry: `cd infra && pulumi preview --policy-pack policies`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pulumi_policy import EnforcementLevel, PolicyPack

from infra.policies.resource_rules import RESOURCE_POLICIES
from infra.policies.stack_rules import STACK_POLICIES

PolicyPack("loopworks", [*RESOURCE_POLICIES, *STACK_POLICIES], enforcement_level=EnforcementLevel.MANDATORY)
