"""The configuration of Prometheus in the checkout, with the folders in which a site has its runs."""

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


class FilterModule:
    """What Ansible looks for in this file."""

    def filters(self) -> dict[str, Any]:
        """Names of the filters."""
        return {"watching_runs": watching_runs}
