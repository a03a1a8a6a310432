"""Test hosts are made by root, with tools that a machine may lack."""

from __future__ import annotations

import os
import shutil

import pytest


def needs_root_and(tools: tuple[str, ...]) -> None:
    """Skips the test that asks, unless this is root and all tools are here."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"needs root and {', '.join(tools)} (missing: {', '.join(missing) or 'root'})")
