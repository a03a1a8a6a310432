"""Policies that every plan must meet: `pulumi up --policy-pack policies`, and callable in tests without the CLI."""
