"""How many parameters a model has, from its shape alone. Torch-free: the plan on the control side uses it."""

from __future__ import annotations

from dataclasses import dataclass

from training.config.schema import ModelSection


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by part. `core` is all that one iteration reads: the adapter and the core blocks."""

    embedding: int
    head: int
    prelude: int
    adapter: int
    core_blocks: int
    coda: int
    final_norm: int

    @property
    def core(self) -> int:
        """Parameters that every core iteration uses again."""
        return self.adapter + self.core_blocks

    @property
    def total(self) -> int:
        """All parameters; a tied head is not counted twice."""
        outside = self.embedding + self.head + self.prelude + self.coda + self.final_norm
        return outside + self.core


def count_parameters(model: ModelSection) -> ParameterCount:
    """Returns the exact counts of RecurrentLM(model)."""
    block = block_matrix_elements(model) + 4 * model.width + (2 * model.width if model.qk_bias else 0)
    table = model.vocab_size * model.width
    return ParameterCount(
        embedding=table,
        head=0 if model.tie_embeddings else table,
        prelude=model.prelude_layers * block,
        adapter=2 * model.width**2,
        core_blocks=model.core_layers * block,
        coda=model.coda_layers * block,
        final_norm=model.width,
    )


def block_matrix_elements(model: ModelSection) -> int:
    """Elements of one block's matrices: fused qkv, attention output, and the three of the gated MLP."""
    return 4 * model.width**2 + 3 * model.width * model.mlp_width
