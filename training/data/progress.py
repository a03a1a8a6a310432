"""Progress with rate and time left: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

Advance = Callable[[float], None]
_LOG_INTERVAL_S = 5.0


def human_bytes(count: float) -> str:
    """12_300_000 as "12.3 MB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


@contextlib.contextmanager
def progress(title: str, total: float, show: Callable[[float], str] = human_bytes) -> Iterator[Advance]:
    """Yields a function to call with the amount just finished; `show` writes amounts ("12.3 MB")."""
    console = Console(stderr=True)
    meter = _bar(console, title, total, show) if console.is_terminal else _lines(title, total, show)
    with meter as advance:
        yield advance


@contextlib.contextmanager
def _bar(console: Console, title: str, total: float, show: Callable[[float], str]) -> Iterator[Advance]:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=max(total, 1), rate="")
        started = time.monotonic()
        done = 0.0

        def advance(amount: float) -> None:
            nonlocal done
            done += amount
            rate = done / max(time.monotonic() - started, 1e-3)
            bar.update(task, advance=amount, rate=f"{show(done)} of {show(total)}, {show(rate)}/s")

        yield advance


@contextlib.contextmanager
def _lines(title: str, total: float, show: Callable[[float], str]) -> Iterator[Advance]:
    started = last = time.monotonic()
    done = 0.0

    def write() -> None:
        elapsed = max(time.monotonic() - started, 1e-3)
        rate = done / elapsed
        left = f", {max(total - done, 0) / rate:.0f} s left" if rate and done < total else f" in {elapsed:.1f} s"
        print(f"{title}: {show(done)} of {show(total)}, {show(rate)}/s{left}", file=sys.stderr, flush=True)

    def advance(amount: float) -> None:
        nonlocal done, last
        done += amount
        if time.monotonic() - last >= _LOG_INTERVAL_S:
            last = time.monotonic()
            write()

    yield advance
    write()
