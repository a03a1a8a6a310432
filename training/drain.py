"""The drain mark: a file that says that a node is to be left, and why. Standard library only: it is read on nodes too.

    /var/lib/loopworks/drained     JSON with a key "reason", or text; written by the upgrade playbook or by a person

While the file is there nothing is started on the node, and a run that uses it saves and goes on without it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

DRAIN_MARK = "/var/lib/loopworks/drained"
DRAIN_MARK_VARIABLE = "LOOPWORKS_DRAIN_MARK"
_MOST_CHARACTERS = 200


def drain_mark(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns where this node's mark is; LOOPWORKS_DRAIN_MARK names another place."""
    return Path(environment.get(DRAIN_MARK_VARIABLE) or DRAIN_MARK)


def drain_reason(mark: Path) -> str | None:
    """Returns why the node is drained, in one line; None when it is not."""
    try:
        text = mark.read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # it is there: that alone counts
        return f"{mark} cannot be read: {error.strerror}"
    return " ".join(_reason_in(text).split())[:_MOST_CHARACTERS] or "no reason is given"


def _reason_in(text: str) -> str:
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return str(found.get("reason", "")) if isinstance(found, dict) else str(found)
