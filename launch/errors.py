"""Errors of the control side; the base class and the exit codes are those of the node side."""

from __future__ import annotations

from training.errors import ConfigError, LoopworksError, StorageError, UsageError

__all__ = ["ConfigError", "LoopworksError", "RunFailedError", "StorageError", "UsageError"]


class RunFailedError(LoopworksError):
    """A started run ended with an error; carries the exit code that the failing rank asked for."""

    def __init__(self, cause: str, remedy: str, exit_code: int) -> None:
        super().__init__(cause, remedy)
        self.exit_code = exit_code
