"""Linear recurrences in XLA: chunks of tokens as matrix products, and only states between them."""

import functools

from ejkernel.modules.operations import configs
from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel_xla.linear_recurrence import tiles

_STATES = frozenset({"initial_state"})
_PACKED = frozenset({"cu_seqlens", "sequence_state"})
_GATES = frozenset({"decay"})
_DELTA = frozenset({"decay", "beta"})

OPS: dict[str, tuple[type[configs.BaseOperationConfig], frozenset[str]]] = {
    "recurrent_attention": (configs.RecurrentAttentionConfig, _GATES | {"value_decay"} | _STATES | _PACKED),
    "gated_linear_attention": (configs.GLAttentionConfig, _GATES | _STATES | _PACKED),
    "lightning_attention": (configs.LightningAttentionConfig, _GATES | _STATES | _PACKED),
    "kernel_delta_attention": (configs.KernelDeltaAttentionConfig, _DELTA | _STATES),
    "gated_delta_rule": (configs.GatedDeltaRuleConfig, _DELTA | _STATES | {"segment_ids"}),
    "ragged_gated_delta_rule": (configs.RaggedGatedDeltaRuleConfig, _DELTA | _PACKED),
    "state_space_v2": (configs.StateSpaceV2Config, _GATES | _STATES | {"dt", "skip", "precision"}),
}
"""Each operation's configuration and the optional record fields it can give."""

DIFFERENTIABLE = frozenset({"decay", "value_decay", "beta", "dt", "skip", "initial_state", "sequence_state"})


def _implementation(op: str, config: type[configs.BaseOperationConfig], handles: frozenset[str]) -> Implementation:
    return Implementation(
        family="linear_recurrence",
        only=frozenset({op}),
        name="xla",
        platform="xla",
        backend="any",
        forward="ejkernel_xla.linear_recurrence.forward:forward",
        backward="ejkernel_xla.linear_recurrence.backward:backward",
        gradients=frozenset({"query", "key", "value"}) | (handles & DIFFERENTIABLE),
        requires=Requires(
            devices=frozenset({"cpu", "gpu", "tpu"}),
            dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
            handles=handles,
        ),
        config=ConfigSpace(
            reads=frozenset({tiles.length_field(config)}),
            heuristic=functools.partial(tiles.heuristic, config),
            candidates=functools.partial(tiles.candidates, config),
        ),
    )


IMPLEMENTATIONS = tuple(_implementation(op, *row) for op, row in OPS.items())
