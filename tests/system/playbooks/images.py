"""What test hosts start and install from, built now instead of by the first test that needs it.

python -m tests.system.playbooks.images
"""

from __future__ import annotations

from tests.system.hosts.tree import root_tree
from tests.system.playbooks.mirror import mirror
from tests.system.playbooks.wheelhouse import wheels

if __name__ == "__main__":
    for build in (root_tree, mirror, wheels):
        print(build())
