"""Selected attention in XLA: each block of keys is read once, by all the queries that list it."""

from ejkernel.ops import ConfigSpace
from ejkernel_xla.registration import xla_implementation
from ejkernel_xla.selected_attention import config

GATES = frozenset({"g_slc", "g_cmp", "g_swa"})
COMPRESSED = frozenset({"compressed_key", "compressed_value"})

IMPLEMENTATIONS = (
    xla_implementation(
        "selected_attention",
        gradients=GATES | COMPRESSED | {"query", "key", "value"},
        handles=GATES
        | COMPRESSED
        | {
            "selected_blocks",
            "block_starts",
            "compressed_segment_ids",
            "q_segment_ids",
            "kv_segment_ids",
            "q_positions",
            "window_size",
        },
        config=ConfigSpace.of(config, forward=config.SelectedTiles),
    ),
)
