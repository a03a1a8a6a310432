"""What Prometheus reads on a cluster, made of the files in the checkout."""

from __future__ import annotations

import re
from typing import Any

# One line: `files: [targets/training/*.json]`.
_TRAINING = re.compile(r"^(?P<before>.*files: \[)(?P<file>targets/training/\*\.json)(?P<after>\].*)$", re.MULTILINE)


def watching_runs(configuration: str, runs_dirs: list[str]) -> str:
    """Returns the configuration of Prometheus that reads the targets of runs from these folders too."""
    also = "".join(f", {folder.rstrip('/')}/.targets/*.json" for folder in runs_dirs)
    text, found = _TRAINING.subn(rf"\g<before>\g<file>{also}\g<after>", configuration)
    if found != 1:
        raise ValueError("prometheus.yml: the files of the job training are not where they were expected")
    return text


def merged_rules(texts: list[str]) -> str:
    """Returns rule files as one, comments kept: one file to send and to look at instead of one a concern."""
    parts = []
    for text in texts:
        head, groups, tail = text.partition("groups:\n")
        if not groups:
            raise ValueError(f"a rule file does not begin with groups: {text[:60]!r}")
        parts.append(head + tail)
    return "groups:\n" + "".join(parts)


class FilterModule:
    """What Ansible looks for in this file."""

    def filters(self) -> dict[str, Any]:
        """Names of the filters."""
        return {"merged_rules": merged_rules, "watching_runs": watching_runs}
