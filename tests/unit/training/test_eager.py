"""Runs that compile nothing do not load the compiler, and can have it all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[3]
# In a process of its own: another test may have loaded the compiler already.
STEPS = """
import sys, torch
from training.eager import without_compiler

without_compiler()
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.AdamW([weight], lr=0.1)
(weight * weight).sum().backward()
optimizer.step()
optimizer.zero_grad()
import deepspeed.runtime.zero.muon.muon_optimizer
kept = torch.compiler.disable()(len), torch.compiler.disable(len)
assert kept == (len, len)
assert weight.max() < 1
import inspect
assert inspect.getmodule(compile) is not None, "this looks through all modules"
loaded = [name for name in sys.modules if name.startswith(("torch._inductor", "torch._dynamo."))]
assert not loaded, loaded

compiled = torch.compile(lambda x: x * 2 + 1, backend="eager", fullgraph=True)
assert compiled(torch.ones(2)).tolist() == [3, 3]
assert torch._dynamo is sys.modules["torch._dynamo"] and torch._dynamo.__file__
import torch._dynamo.config
assert torch._dynamo.config.recompile_limit > 0 and "torch._dynamo.symbolic_convert" in sys.modules
optimizer.step()
without_compiler()
assert torch._dynamo.config.recompile_limit > 0, "what is loaded stays"
"""


def test_the_compiler_is_loaded_when_it_is_used() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STEPS], cwd=CHECKOUT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
