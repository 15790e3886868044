"""Reasons for which kernels that translate `score_mod` and `mask_mod` into scalar operations refuse a call."""

from collections.abc import Iterable

from ejkernel.families.tiled_attention.mask_terms import needs_mask_function
from ejkernel.families.tiled_attention.record import TiledAttention
from ejkernel.planning.scalar_programs import scalar_program

NO_FUNCTIONS = "score_mod: got None, needs a function for it or for mask_mod"


def function_refusals(record: TiledAttention) -> Iterable[str]:
    """Yields why kernels for calls with functions cannot compute a record; a window needs no function."""
    if record.score_mod is None and record.mask_mod is None:
        yield NO_FUNCTIONS
    for name in ("score_mod", "mask_mod"):
        function = getattr(record, name)
        if function is not None and (name == "score_mod" or needs_mask_function(record)):
            yield from (f"{name}: {reason}" for reason in scalar_program(function).refusals)
    if record.score_mod is None or record.dropout_prob == 0:
        return
    program = scalar_program(record.score_mod)
    if not program.refusals and not program.has_constant_slope:
        yield "score_mod: has another derivative by the score than 1, which the kernels do not combine with dropout"
