"""Infrastructure side: a Pulumi program for a GPU cluster on AWS; its catalogue, validators, policies, cost estimate.

Meets the rest of the project only through files: the stack outputs (inventory/stack-outputs.schema.json) and the
JSON that `python -m infra.cost --json` prints.
"""
