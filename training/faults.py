"""How an exception of a rank becomes a record that the control side can act on."""

from __future__ import annotations

import errno
import time

from training.errors import EXIT_FAILED, LoopworksError, OutOfMemoryError, StorageError
from training.records import RankError

# What torch says when memory is short, apart from its own OutOfMemoryError: the CPU allocator and the libraries of
# the GPU.
_MEMORY_WORDS = ("not enough memory", "can't allocate memory", "cuda out of memory", "cublas_status_alloc_failed")

_STORAGE_ERRNO = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
# What the writers of safetensors and torch say, which wrap the system's error.
_STORAGE_WORDS = ("No space left on device", "PytorchStreamWriter failed writing")
_STORAGE_REMEDY = "free space, correct the permissions, or choose another place: --set run.dir=PATH"


def is_out_of_memory(error: BaseException) -> bool:
    """True when `error` means that the memory of the device or of the machine is full."""
    if isinstance(error, (MemoryError, OutOfMemoryError)) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _MEMORY_WORDS)


def as_loopworks_error(error: BaseException) -> LoopworksError | None:
    """Returns the foreseen form of an exception; None when it is a defect that needs its traceback."""
    if isinstance(error, LoopworksError):
        return error
    if is_out_of_memory(error):
        return OutOfMemoryError(
            "out of memory",
            "use a smaller training.micro_batch_size, training.activation_checkpointing: per_iteration, "
            "a higher distributed.zero_stage or more ranks",
        )
    if isinstance(error, OSError) and error.errno in _STORAGE_ERRNO:
        return StorageError(f"cannot write {error.filename or 'a file'}: {error.strerror}", _STORAGE_REMEDY)
    if any(word in str(error) for word in _STORAGE_WORDS):
        return StorageError("cannot write a file: no space left on device", _STORAGE_REMEDY)
    return None


def rank_error(rank: int, error: BaseException) -> RankError:
    """Returns the record of a failed rank."""
    known = as_loopworks_error(error)
    if known is None:
        return RankError(
            rank=rank,
            time=time.time(),
            cause=f"{type(error).__name__}: {error}",
            exit_code=EXIT_FAILED,
            expected=False,
        )
    return RankError(
        rank=rank,
        time=time.time(),
        cause=known.cause,
        remedy=known.remedy,
        exit_code=known.exit_code,
        kind="out_of_memory" if isinstance(known, OutOfMemoryError) else "error",
        expected=True,
    )
