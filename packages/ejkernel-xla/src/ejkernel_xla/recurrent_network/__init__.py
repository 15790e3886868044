"""Recurrent networks in XLA: every product that does not wait for a state is taken over all tokens at once."""

from ejkernel.modules.operations.configs import GRUConfig, LSTMConfig, RNNConfig
from ejkernel.ops import Implementation, Requires
from ejkernel_xla.recurrent_network import tiles

STATES = {"rnn": ("initial_hidden",), "gru": ("initial_hidden",), "lstm": ("initial_hidden", "initial_cell")}
WEIGHTS = ("weight_ih_deep", "bias_ih", "bias_hh")

IMPLEMENTATIONS = tuple(
    Implementation(
        family="recurrent_network",
        only=frozenset({op}),
        name="xla",
        platform="xla",
        backend="any",
        forward="ejkernel_xla.recurrent_network.forward:forward",
        backward="ejkernel_xla.recurrent_network.backward:backward",
        gradients=frozenset({"x", "weight_ih", "weight_hh", *WEIGHTS, *STATES[op]}),
        requires=Requires(
            devices=frozenset({"cpu", "gpu", "tpu"}),
            dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
            handles=frozenset({"seq_lengths", *WEIGHTS, *STATES[op]}),
        ),
        config=tiles.space(config),
    )
    for op, config in (("rnn", RNNConfig), ("gru", GRUConfig), ("lstm", LSTMConfig))
)
