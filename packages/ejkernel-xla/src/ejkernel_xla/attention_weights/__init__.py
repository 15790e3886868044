"""Softmax attention with its weights in XLA: whole rows of the weights at a time, each made once."""

from ejkernel.families.attention_weights import FAMILY
from ejkernel.families.tiled_attention import DROPOUT_FIELDS, MASK_FIELDS, SOFTMAX_FIELDS
from ejkernel.ops import ConfigSpace
from ejkernel_xla.attention_weights import config
from ejkernel_xla.registration import xla_implementation

IMPLEMENTATIONS = (
    xla_implementation(
        FAMILY,
        gradients=set(FAMILY.differentiable) - {"relative_bias", "score_mod"},
        handles=MASK_FIELDS | SOFTMAX_FIELDS | DROPOUT_FIELDS | {"bias", "logits_dtype"},
        config=ConfigSpace.of(config, forward=config.WeightRows),
    ),
)
