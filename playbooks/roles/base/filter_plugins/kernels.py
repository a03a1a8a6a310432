"""Which kernel packages are held."""

from __future__ import annotations

import re
from typing import Any

# 6.8.0-1015-aws, 5.15.0-91-generic, 6.1.0-18-cloud-amd64, 6.12.48+deb13-amd64: what follows the version is the flavour.
RELEASE = re.compile(r"\d[\d.]*(?:\+[a-z0-9]+)?(?:-\d+)?-(?P<flavour>[a-z][a-z0-9-]*)$")
KINDS = r"(?:(?:image|headers|modules|modules-extra)-)?"
# Ubuntu's names for a newer kernel on an older release.
SERIES = r"(?:-hwe-[\d.]+(?:-edge)?|-lts-[\d.]+|-[\d.]+)?"


def kernels_to_hold(lines: list[str], release: str) -> list[str]:
    """Installed packages that decide which kernel boots, and are not held yet.

    `lines` are `dpkg-query --showformat '${db:Status-Abbrev} ${Package}\\n'`, `release` is what `uname -r` prints.
    """
    return [name for wanted, name in _of_flavour(lines, release) if wanted != "h"]


def kernels_held(lines: list[str], release: str) -> list[str]:
    """The same packages where they are held."""
    return [name for wanted, name in _of_flavour(lines, release) if wanted == "h"]


def _of_flavour(lines: list[str], release: str) -> list[tuple[str, str]]:
    match = RELEASE.match(release)
    if match is None:
        return []  # a kernel that no package of the distribution brought
    meta = re.compile(rf"linux-{KINDS}{re.escape(match['flavour'])}{SERIES}$")
    found = []
    for line in lines:
        status, _, name = line.partition(" ")
        name = name.strip()
        # The second letter: i is installed. The running kernel itself too, or autoremove may take it.
        if status[1:2] == "i" and (meta.match(name) or name.endswith(f"-{release}")):
            found.append((status[0], name))
    return sorted(found, key=lambda item: item[1])


class FilterModule:
    """What Ansible looks for in this file."""

    def filters(self) -> dict[str, Any]:
        """Names of the filters."""
        return {"kernels_to_hold": kernels_to_hold, "kernels_held": kernels_held}
