"""Starting without PyTorch's compiler, for processes that compile nothing.

torch and DeepSpeed mark functions that the compiler has to leave alone, and load the compiler for that on the first
call of one: over a thousand modules, and three tenths of the processor time in which a rank starts
(benchmarks/rank_start.py).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from deepspeed.runtime import compiler as deepspeed_compiler

_NAME = "torch._dynamo"


class _NotLoaded(ModuleType):
    """Stands for torch._dynamo where nothing is traced: there these functions do nothing. Any other name loads it."""

    @staticmethod
    def disable(fn: Callable[..., Any] | None = None, recursive: bool = True, **options: Any) -> Callable[..., Any]:
        """Returns the function, or decorates it, as it is: no compiler is there that would trace it."""
        return (lambda function: function) if fn is None else fn

    @staticmethod
    def graph_break(msg: str = "") -> None:
        """Ends the part that is traced, and there is none."""

    def __getattr__(self, name: str) -> Any:
        # Whoever looks through all modules (inspect does) asks for such names, and means no compiler.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), name)


def without_compiler() -> None:
    """Keeps torch and DeepSpeed from loading the compiler only to switch it off.

    For a process that will not compile, before it makes an engine. Whoever compiles all the same gets the real one, but
    then functions that were called before are traced like any other.
    """
    if _NAME in sys.modules:
        return
    sys.modules[_NAME] = torch._dynamo = _NotLoaded(_NAME)
    # Muon's functions are compiled where they are defined, which happens with every optimizer.
    deepspeed_compiler.compile = lambda: lambda function: function
