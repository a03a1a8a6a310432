"""What the AWS stack of a plan costs: asks the infra room by its command, since launch does not import it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from launch.errors import UsageError
from launch.request import CHECKOUT


def stack_cost(stack: str) -> dict[str, Any]:
    """Returns the estimate of `python -m infra.cost STACK --json`. Raises UsageError with what that says."""
    command = [sys.executable, "-m", "infra.cost", stack, "--json"]
    outcome = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=60, check=False)
    if outcome.returncode:
        cause = outcome.stderr.strip() or f"exit code {outcome.returncode}"
        raise UsageError(
            f"--stack {stack}: {cause}", "name a stack such as dev or prod, or the path of a Pulumi.STACK.yaml"
        )
    return dict(json.loads(outcome.stdout))
