"""Model presets: the shape of a model under a name.

huginn-3.5b is the public reference model (arXiv 2502.05171, section 4; 3,564,976,800 parameters). The others keep its
proportions (2/4/2 layers, inner width about 2.7 to 3.4 times the width) at a size for fewer GPUs; `demo` trains in
minutes on a laptop.
"""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "huginn-3.5b": {
        "vocab_size": 65536,
        "context_length": 4096,
        "width": 5280,
        "heads": 55,
        "mlp_width": 17920,
        "prelude_layers": 2,
        "core_layers": 4,
        "coda_layers": 2,
        "mean_recurrence": 32,
        "backprop_depth": 8,
    },
    "1b": {
        "vocab_size": 65536,
        "context_length": 4096,
        "width": 2816,
        "heads": 22,
        "mlp_width": 7680,
        "prelude_layers": 2,
        "core_layers": 4,
        "coda_layers": 2,
        "mean_recurrence": 32,
        "backprop_depth": 8,
    },
    "350m": {
        "vocab_size": 65536,
        "context_length": 2048,
        "width": 1536,
        "heads": 24,
        "mlp_width": 4608,
        "prelude_layers": 2,
        "core_layers": 4,
        "coda_layers": 2,
        "mean_recurrence": 16,
        "backprop_depth": 8,
    },
    "demo": {
        "vocab_size": 2048,
        "context_length": 128,
        "width": 192,
        "heads": 6,
        "mlp_width": 512,
        "prelude_layers": 1,
        "core_layers": 2,
        "coda_layers": 1,
        "mean_recurrence": 4,
        "backprop_depth": 2,
    },
}
