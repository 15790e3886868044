"""Conformance cases of the kernels with functions of pairs."""

from ejkernel.modules.operations.cases.pair_function_options import cases_of_options, cases_of_positions
from ejkernel.modules.operations.flash_attention import FlashAttentionArguments
from ejkernel.ops.model import Case


def function_cases() -> dict[str, tuple[Case, ...]]:
    """Returns the conformance cases of each operation, by its name."""
    return {"flash_attention": cases_of_options(FlashAttentionArguments) + cases_of_positions(FlashAttentionArguments)}
