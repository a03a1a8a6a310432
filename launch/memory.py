"""Estimates of the memory that a rank needs, from the shape of the model and the ZeRO stage.

States follow the ZeRO paper (arXiv 1910.02054, section 3) with Adam: weights, gradients, and fp32 master weights with
two moments. Activations count what autograd keeps for the iterations that receive gradient; they do not depend on the
recurrence count r, because truncated backpropagation keeps only the last k iterations.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.config.schema import ModelSection
from training.model_size import count_parameters

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

# Tensors of width C and of the MLP's inner width that a block keeps for its backward pass: inputs of four norms, fused
# qkv, attention output, two sums, and gate, up and product of the MLP.
_WIDTH_TENSORS = 13
_MLP_TENSORS = 4
# Logits that the loss holds at once (training/model/vocab.py).
LOGITS_CHUNK_ELEMENTS = 2**26


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes a rank needs, by what they hold. An estimate: allocator slack and library buffers come on top."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int

    @property
    def total_bytes(self) -> int:
        """Sum of all parts."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.activations_bytes


def estimate_memory(
    model: ModelSection,
    *,
    precision: str,
    zero_stage: int,
    world_size: int,
    micro_batch: int,
    sequence_length: int,
    checkpointing: bool,
) -> MemoryEstimate:
    """Returns the estimate for one rank.

    Under stage 3 the core's weights are held whole through a step (training/zero3.py), so they count in full.
    """
    size = count_parameters(model)
    element = ELEMENT_BYTES[precision]
    shards = world_size
    weights = element * size.total
    gradients = element * size.total
    # fp32 under stage 0 updates the weights themselves; every other case keeps an fp32 copy beside them.
    optimizer = (8 if precision == "fp32" and zero_stage == 0 else 12) * size.total
    if zero_stage >= 1:
        optimizer //= shards
    if zero_stage >= 2:
        gradients //= shards
    elif precision != "fp32":
        gradients = 4 * size.total  # accumulated in fp32
    if zero_stage == 3:
        weights = weights // shards + element * size.core
    activations = micro_batch * activation_bytes_per_sequence(model, sequence_length, element, checkpointing)
    activations += head_bytes(model, micro_batch * sequence_length, element)
    return MemoryEstimate(weights, gradients, optimizer, activations)


def activation_bytes_per_sequence(model: ModelSection, sequence_length: int, element: int, checkpointing: bool) -> int:
    """Returns the bytes that forward and backward of one sequence keep."""
    block = sequence_length * (_WIDTH_TENSORS * model.width + _MLP_TENSORS * model.mlp_width) * element
    iteration = model.core_layers * block + 3 * sequence_length * model.width * element
    outside = (model.prelude_layers + model.coda_layers) * block
    if checkpointing:
        kept = model.backprop_depth * sequence_length * model.width * element + iteration
    else:
        kept = model.backprop_depth * iteration
    return outside + kept


def head_bytes(model: ModelSection, tokens: int, element: int) -> int:
    """Returns what the loss holds: one chunk of logits three times, and the head's gradient until the backward pass."""
    chunk = min(tokens * model.vocab_size, LOGITS_CHUNK_ELEMENTS)
    one_chunk = chunk == tokens * model.vocab_size
    return chunk * (8 + element) + model.vocab_size * model.width * (element if one_chunk else 4)
