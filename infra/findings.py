"""What is wrong with a configuration: findings, each with the key, the cause and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2

Level = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One fault: `key` is the configuration key to look at, `cause` what is wrong, `remedy` what to do next."""

    level: Level
    key: str
    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.level}: {self.key}: {self.cause}\n    next: {self.remedy}"

    def as_dict(self) -> dict[str, str]:
        """The finding as a JSON object."""
        return asdict(self)


def error(key: str, cause: str, remedy: str) -> Finding:
    """A finding that stops the run before any AWS call that changes something."""
    return Finding("error", key, cause, remedy)


def warning(key: str, cause: str, remedy: str) -> Finding:
    """A finding that is shown and does not stop the run."""
    return Finding("warning", key, cause, remedy)


def errors_of(findings: Iterable[Finding]) -> list[Finding]:
    """Only the findings that stop the run."""
    return [finding for finding in findings if finding.level == "error"]


class InfraError(Exception):
    """The configuration or the account cannot give this cluster; `findings` lists everything at once."""

    exit_code = EXIT_CONFIG

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = list(findings)
        count = len(errors_of(self.findings))
        head = f"the cluster configuration has {count} error{'' if count == 1 else 's'}; nothing was changed"
        super().__init__("\n".join([head, *(f"  {finding}" for finding in self.findings)]))
