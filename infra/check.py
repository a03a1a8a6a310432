"""Check the configuration of a stack: `python -m infra.check dev [--account] [--json]`.

Exits 0 when the cluster can be built and 2 when not.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
from pathlib import Path

from infra.config import load_stack_file
from infra.findings import EXIT_CONFIG, EXIT_OK, InfraError, errors_of
from infra.validate import check_account, check_config


def stack_path(stack: str) -> Path:
    """The file of a stack name, or the path itself where it ends in .yaml."""
    return Path(stack) if stack.endswith(".yaml") else Path(__file__).parent / f"Pulumi.{stack}.yaml"


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m infra.check", description=__doc__)
    parser.add_argument("stack", help="stack name (dev, prod) or path of a Pulumi.STACK.yaml")
    parser.add_argument("--account", action="store_true", help="also read quotas, zones and images of the AWS account")
    parser.add_argument("--json", action="store_true", help="print findings as JSON")
    arguments = parser.parse_args(argv)
    try:
        config = load_stack_file(stack_path(arguments.stack))
        findings = check_config(config, now=dt.datetime.now(dt.timezone.utc))
        if arguments.account and not errors_of(findings):
            from infra.account import read_account

            findings += check_account(config, read_account(config))
    except InfraError as fault:
        findings = fault.findings
    if arguments.json:
        print(json.dumps([finding.as_dict() for finding in findings], indent=2))
    else:
        print("\n".join(map(str, findings)) or "no findings")
    return EXIT_CONFIG if errors_of(findings) else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
