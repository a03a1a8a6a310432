"""ZeRO-3 for a core that is used r times: its weights are gathered once a step, not once an iteration.

DeepSpeed gathers a module's weights before each use and releases them after it. A core that runs r times would fetch
its weights r times in the forward pass and k times in the backward pass. Raising the persistence threshold does not
help: a changing r invalidates the prefetch trace, and without a trace DeepSpeed releases persistent weights like any
other. What it never releases is a weight that some module is still using, so `CoreHold` registers one more user for
every core weight for the length of a step. Gradients and optimizer state stay sharded as ever. The price is memory:
the whole core in the working precision on each rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

# Module ids of DeepSpeed count from 0: no module has this one.
_HOLDER_ID = -1


class CoreHold:
    """Keeps partitioned parameters gathered from their first use until the optimizer step.

    The optimizer step partitions all parameters and clears every hold, so `hold` is called again at the start of each
    step.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        # Typed Any: ds_active_sub_modules is added by DeepSpeed.
        self._parameters: list[Any] = list(parameters)

    def hold(self) -> None:
        """From here to the optimizer step the parameters stay gathered once they are."""
        for parameter in self._parameters:
            parameter.ds_active_sub_modules.add(_HOLDER_ID)

    def release(self) -> None:
        """Ends the hold without an optimizer step (evaluation, saving)."""
        for parameter in self._parameters:
            parameter.ds_active_sub_modules.discard(_HOLDER_ID)
            if parameter.ds_status.name == "AVAILABLE" and not parameter.ds_active_sub_modules:
                parameter.partition()
