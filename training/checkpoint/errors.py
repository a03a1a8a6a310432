"""Errors of the checkpoint room."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from training.errors import StorageError


class CheckpointError(StorageError):
    """A checkpoint could not be written, read or converted; earlier checkpoints are untouched."""


class RemoteError(StorageError):
    """The object store refused a request for a reason that waiting does not cure (credentials, bucket, clock)."""


class RemoteUnavailable(StorageError):
    """The object store cannot be reached or answers with a server error; the request is worth repeating."""


# What the operating system says, and what a person can do about it.
_REMEDIES = {
    errno.ENOSPC: (
        "the disk is full",
        "free space or lower checkpoint.keep_last; training goes on and the next interval tries again",
    ),
    errno.EDQUOT: ("the disk quota is used up", "free space or raise the quota; the next interval tries again"),
    errno.EFBIG: (
        "a file grew over the size limit of this process",
        "raise the limit (ulimit -f); the next interval tries again",
    ),
    errno.EROFS: ("the file system is read-only", "mount it read-write; the next interval tries again"),
    errno.EACCES: ("permission is denied", "make the folder writable for the user of the run"),
    errno.EPERM: ("permission is denied", "make the folder writable for the user of the run"),
    errno.EIO: ("the disk reports an input/output error", "check the disk (dmesg) and move the run folder elsewhere"),
    errno.ESTALE: ("the network file system lost its handle", "check the file server; the next interval tries again"),
}


def describe_os_error(error: OSError, folder: Path) -> CheckpointError:
    """Turns an operating-system error met while writing below `folder` into one that names cause and next step."""
    cause, remedy = _REMEDIES.get(
        error.errno or 0, (str(error.strerror or error), "check the folder; the next interval tries again")
    )
    where = error.filename or folder
    free = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        existing = next((p for p in (folder, *folder.parents) if p.exists()), Path("/"))
        free = f" ({shutil.disk_usage(existing).free / 2**20:,.0f} MiB free)"
    return CheckpointError(f"checkpoint not saved: {cause}{free}: {where}", remedy)
