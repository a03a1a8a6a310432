"""Runs a function over tasks in worker processes that never outlive their parent."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from training.errors import DataError

Task = TypeVar("Task")
Result = TypeVar("Result")


def worker_count(wanted: int) -> int:
    """`wanted`, or one a CPU this process may use when it is 0."""
    return wanted or len(os.sched_getaffinity(0))


def run_tasks(function: Callable[[Task], Result], tasks: Iterable[Task], workers: int) -> Iterator[Result]:
    """Yields results as they come, in no particular order; at most two tasks a worker are in flight.

    The first error ends it: tasks in flight finish, the others are not begun. One worker means this process.
    """
    if workers == 1:
        yield from map(function, tasks)
        return
    # Not fork: the parent may hold threads (progress, torch) whose locks a child would inherit.
    context = multiprocessing.get_context("forkserver")
    waiting = iter(tasks)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker)
    wait_for_tasks = True
    try:
        running: set[Future[Result]] = {pool.submit(function, task) for task in itertools.islice(waiting, 2 * workers)}
        while running:
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                yield future.result()
                running |= {pool.submit(function, task) for task in itertools.islice(waiting, 1)}
    except BrokenProcessPool:
        raise DataError(
            "a worker process was killed, most likely for lack of memory",
            "use fewer workers or smaller parts (prepare.part_bytes) and run the command again",
        ) from None
    except KeyboardInterrupt:
        wait_for_tasks = False  # what they leave unfinished has no name yet; the next run does it again
        raise
    finally:
        pool.shutdown(wait=wait_for_tasks, cancel_futures=True)


def _begin_worker() -> None:
    """Ties a worker to its parent and to one CPU.

    It waits for tasks on a pipe that it holds open itself: without a watch it would survive a parent that was killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt from the keyboard is the parent's to handle
    # The tokenizer's own threads would compete with the other workers.
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
