"""Selected attention in XLA: each block of keys is read once, by all the queries that list it."""

from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel_xla.selected_attention import tiles

GATES = frozenset({"g_slc", "g_cmp", "g_swa"})
COMPRESSED = frozenset({"compressed_key", "compressed_value"})

IMPLEMENTATIONS = (
    Implementation(
        family="selected_attention",
        name="xla",
        platform="xla",
        backend="any",
        forward="ejkernel_xla.selected_attention.forward:forward",
        backward="ejkernel_xla.selected_attention.backward:backward",
        gradients=GATES | COMPRESSED | {"query", "key", "value"},
        requires=Requires(
            devices=frozenset({"cpu", "gpu", "tpu"}),
            symbolic=True,
            dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
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
        ),
        config=ConfigSpace(
            heuristic=tiles.heuristic, candidates=tiles.candidates, forward=tiles.SelectedTiles, faces=tiles.FACES
        ),
    ),
)
