"""What all tests share: skipped system tests are named with what they miss, and in CI a skip is a failure."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator

import pytest

IN_CI = os.environ.get("CI", "").lower() == "true"

# A shell that starts the tests in the background has SIGINT ignored, and so would every process that a test starts: the
# tests of Ctrl-C would wait in vain. Handlers are not inherited, so children then begin with the system's default.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests and what they start share few cores, and OpenMP's threads would spin while they wait for each other: half of the
# CPU time. Read when torch is loaded, so here, before any test module.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Ansible replaces it by a class when it is imported, and torch's compiler takes functions only.
INTERN = sys.intern


def pytest_collectstart() -> None:
    """Undoes what importing Ansible's modules has done to this process, before the next test module is imported."""
    sys.intern = INTERN


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """The same before each test."""
    sys.intern = INTERN


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With CI=true nothing may be left out: what a test misses, .ci/packages has to install."""
    report = yield
    if IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = (
            f"skipped in CI: {report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr}"
        )
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what was left out and how to have it."""
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.write_line(
            f"{len(skipped)} test(s) were left out for want of something on this machine (reasons above). "
            "As root on Debian or Ubuntu, .ci/packages installs it (.ci/packages qemu-system-x86 for `make test-vm`)."
        )
