"""Softmax attention that also returns its weights."""

import dataclasses

from ejkernel.families import tiled_attention
from ejkernel.families.attention_weights.reference import OutputAndWeights, reference

__all__ = ["FAMILY", "OutputAndWeights", "reference"]


FAMILY = dataclasses.replace(
    tiled_attention.FAMILY,
    name="attention_weights",
    axes={"output": ("b t h v", "b h t s")},
    reference=reference,
)
