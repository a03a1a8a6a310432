"""A stand-in for AWS's repository of the Lustre client: a package a kernel, and a mount helper that notes its call."""

from __future__ import annotations

import platform
import struct
from pathlib import Path

from tests.system.playbooks.dummy_packages import Package, publish

VERSION = "2.15.6-1fsx9"
# What AWS serves: kernels of its own instances, none of which runs here.
AWS_KERNELS = ("5.15.0-1084-aws", "6.8.0-1029-aws", "6.8.0-1033-aws")
NOTES = "/var/log/lustre-standin.log"
# mount(8) calls it with source, folder and options. Something has to be mounted, or systemd says that nothing is.
HELPER = f"""#!/bin/sh
echo "$@" >> {NOTES}
exec mount -t tmpfs -o size=1m lustre-standin "$2"
"""


def repository(folder: Path) -> None:
    """Makes a repository with two suites: here has the client of the running kernel, elsewhere has only others.

    key.asc is the key of the first, elsewhere.asc that of the second.
    """
    others = [_modules(kernel) for kernel in AWS_KERNELS]
    tools = Package("lustre-client-utils", VERSION, {}, {"sbin/mount.lustre": HELPER})
    publish(folder, [tools, _modules(platform.release()), *others], folder / "key.asc", suite="here")
    publish(folder, [tools, *others], folder / "elsewhere.asc", suite="elsewhere")


def _modules(kernel: str) -> Package:
    files = {f"lib/modules/{kernel}/updates/kernel/fs/lustre.ko": module("lustre")}
    fields = {"Depends": f"kmod, lustre-client-utils (= {VERSION})"}
    return Package(f"lustre-client-modules-{kernel}", VERSION, fields, files, f"depmod {kernel}\n")


def module(name: str) -> bytes:
    """Returns a kernel module with nothing in it but its description (an ELF file with the section .modinfo)."""
    info = f"name={name}\0license=GPL\0description=stand-in\0".encode()
    names = b"\0.modinfo\0.shstrtab\0"
    header = 64
    body = info + names
    sections = [(0, 0, 0, 0), (1, 1, header, len(info)), (10, 3, header + len(info), len(names))]
    # Relocatable, x86-64: what depmod and modinfo look at is the same for each machine.
    start = struct.pack("<4sBBB9xHHI", b"\x7fELF", 2, 1, 1, 1, 62, 1)
    start += struct.pack("<QQQIHHHHHH", 0, 0, header + len(body), 0, header, 0, 0, 64, len(sections), 2)
    table = [
        struct.pack("<IIQQQQIIQQ", word, kind, 0, 0, place, size, 0, 0, 1, 0) for word, kind, place, size in sections
    ]
    return start + body + b"".join(table)
