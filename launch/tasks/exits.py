"""How a task ends: one message and an exit code for what was foreseen."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from invoke import Exit


def exits_cleanly(body: Callable[..., Any]) -> Callable[..., Any]:
    """Turns a foreseen error into one message and its exit code; anything else is a defect and keeps its traceback."""

    @functools.wraps(body)
    def run(*args: Any, **kwargs: Any) -> None:
        from launch.errors import LoopworksError
        from launch.present import print_error

        try:
            code = body(*args, **kwargs)
        except LoopworksError as error:
            print_error(error)
            raise Exit(code=error.exit_code) from None
        except KeyboardInterrupt:
            raise Exit("interrupted", code=130) from None
        if code:
            raise Exit(code=code)

    return run
