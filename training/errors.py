"""Errors of the node side. Each one names the cause and the next step; none is shown with a traceback.

Exit codes (the same on the control side): 0 ok, 1 failed, 2 usage or configuration, 3 preflight, 4 no capacity,
75 preempted (will resume), 130 interrupted.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_PREFLIGHT = 3
EXIT_NO_CAPACITY = 4
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130


class LoopworksError(Exception):
    """An error that a user can act on.

    `cause` says what is wrong, `remedy` what to do next; `exit_code` is what the process ends with.
    """

    exit_code = EXIT_FAILED

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.cause}\n  next: {self.remedy}" if self.remedy else self.cause


class ConfigError(LoopworksError):
    """The configuration cannot be used; `findings` lists everything that is wrong with it, one line each."""

    exit_code = EXIT_CONFIG

    def __init__(
        self, findings: list[str], remedy: str = "correct the configuration and run the command again"
    ) -> None:
        title = (
            "the configuration has an error:"
            if len(findings) == 1
            else f"the configuration has {len(findings)} errors:"
        )
        super().__init__("\n  - ".join([title, *findings]), remedy)
        self.findings = findings


class UsageError(LoopworksError):
    """The command was given something that it cannot use (a missing file, a run that does not exist)."""

    exit_code = EXIT_CONFIG


class DataError(LoopworksError):
    """A dataset is missing, damaged or does not fit the model; names file and offset where there is one."""


class OutOfMemoryError(LoopworksError):
    """A rank ran out of memory; the control side starts again with half the micro-batch."""


class NonFiniteError(LoopworksError):
    """Loss or gradients stayed NaN or infinite for longer than the run tolerates."""


class StorageError(LoopworksError):
    """A file could not be written: no permission, no space, a read-only file system."""

    exit_code = EXIT_CONFIG
