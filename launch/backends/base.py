"""What a backend is: a pure function from a plan to what will run on each node, and a handle on what runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from launch.plan import RunPlan


@dataclass(frozen=True)
class LaunchSpec:
    """What runs on one node: a command, its environment (added to the node's own) and where."""

    node: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    directory: str = "."


class RunHandle(Protocol):
    """A started run."""

    @property
    def pid(self) -> int:
        """Process id of the node agent on this machine."""

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Waits for the end and returns the exit code, or None when the time is over."""

    def stop(self, grace_s: float) -> None:
        """Asks all ranks to save and leave, ends what is left after `grace_s`, and leaves no process behind."""


class Backend(Protocol):
    """Starts the ranks of a plan."""

    @property
    def name(self) -> str:
        """What --backend calls it."""

    def specs(self, plan: RunPlan, run_dir: str, checkout: str, console: bool) -> Sequence[LaunchSpec]:
        """Returns what would run, one spec a node; pure, so that --dry-run can print it."""

    def start(self, specs: Sequence[LaunchSpec]) -> RunHandle:
        """Runs it."""
