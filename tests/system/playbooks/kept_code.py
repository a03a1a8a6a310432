"""Runs at each start of Python on a bare host: what Ansible hands over is compiled once, and not for every task.

A module comes as a zip of sources, and compiling them is a third of what a task costs a host. The hash of its source
names what was compiled.
"""

from __future__ import annotations

import _imp
import marshal
import os
import zipimport

# ruff: noqa: PTH103, PTH105, PTH123 (importing pathlib at each start would cost a part of what is saved)
KEPT = "/var/cache/loopworks-test"
compiled = zipimport._compile_source


def kept(path: str, source: bytes) -> object:
    """Returns the code of a source, from an earlier start when there was one."""
    place = f"{KEPT}/{_imp.source_hash(0, source).hex()}"
    try:
        with open(place, "rb") as file:
            code = marshal.load(file)
    except (OSError, EOFError, ValueError):
        code = compiled(path, source)
        if os.geteuid() == 0:
            os.makedirs(KEPT, exist_ok=True)
            with open(f"{place}.{os.getpid()}", "wb") as fresh:
                marshal.dump(code, fresh)
            os.replace(fresh.name, place)
    _imp._fix_co_filename(code, path)
    return code


zipimport._compile_source = kept
