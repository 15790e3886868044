"""The Triton kernels' numbers on the CPU: the conformance suite with Triton's interpreter, which is chosen at import.

The interpreter runs program after program in NumPy, so the parts of the suite that add least are left to devices:
determinism, and the eager call, which differ from these in nothing that the kernel sees.
"""

import pytest
from triton_chips import assert_conforms, run_interpreted

FLASH = ("flash_attention",)
SPARSE = ("blocksparse_attention",)
OTHERS = ("scaled_dot_product_attention", "flash_mla", "mla_decode")
MASKS = "(causal or window or segments or pack or padded or positions or mask)"
# What the kernels do not have: the slopes of ALiBi and T5's bias of distances. Functions have another implementation.
REFUSED = "(slopes or distances or function)"
FUNCTIONS = "(test_value and function and not test_shapes and not test_residuals and not test_eager) or test_handles"
# Cases in bfloat16 that join features are there for kernels in 16 bits alone. These have each feature in float32, too.
FEW = "not (bfloat16 and (dropout or sinks or keys or many or heads))"
VALUES = f"(test_value and not test_shapes and not test_residuals and not test_eager and {FEW})"
GRADIENTS = f"(test_gradients and {FEW})"
ALL = " or ".join(
    (
        VALUES,
        GRADIENTS,
        "(test_residuals and (sinks or numerator))",
        f"(test_padding and {FEW})",
        f"(test_vmap and (sinks or dropout) and {FEW})",
        "(test_shard and (everything or packed))",
        "(test_request and (packed or segments) and not bfloat16)",
        "(test_candidates and forward)",
        "test_forward_mode",
    )
)
# The tests of a case are in one process, where they share its reference. Operations other than flash attention lower
# to the same record, so each has what its own cases add: their numbers.
PARTS = {
    "masks": (FLASH, f"({ALL}) and {MASKS} and not {REFUSED}"),
    "the rest": (FLASH, f"({ALL}) and not {MASKS} and not {REFUSED}"),
    "patterns": (
        SPARSE,
        f"(({VALUES} or {GRADIENTS} or test_padding) and (patterns or scattered or chunks))"
        " or ((test_vmap or test_shard) and patterns) or (test_request and segments)",
    ),
    "other operations": (OTHERS, f"{VALUES} or {GRADIENTS}"),
}


@pytest.mark.whole
@pytest.mark.parametrize("part", PARTS)
def test_conformance(part):
    operations, selection = PARTS[part]
    assert_conforms(operations, selection)


def test_conformance_of_functions():
    assert_conforms(FLASH, FUNCTIONS, "triton_functions", serves_all=False)


def test_sharded_checkpointed_and_vmapped_attention_matches_xla():
    """`shard_map`, dropout's counters and a sink's gradient among it, `jax.checkpoint` and `jax.vmap`, against XLA."""
    run_interpreted("transformed_process.py")


def test_device_helpers_of_blocks_match_numpy():
    """What the toolkit has for families to come."""
    run_interpreted("blocks_process.py")


def test_small_tiles():
    """Full tiles next to partial ones, groups that end inside of tiles, rows of no matrix; several programs."""
    run_interpreted("small_tiles_process.py")
