"""What a backward implementation is given."""

from typing import Any

from ejkernel.ops.arguments import arguments, static


@arguments
class Pullback:
    """The pieces of one backward pass.

    Attributes:
        record: The forward record, as the forward implementation got it.
        residuals: The family's residuals of the forward pass.
        output: The forward output.
        cotangent: Cotangent of the output; same structure, shapes and dtypes. None until the backward pass runs.
        wanted: Names of the record fields whose gradient is asked for. A backward implementation returns
            `{name: gradient}` for at least these, each with the field's shape and dtype.
    """

    record: Any
    residuals: Any
    output: Any
    cotangent: Any
    wanted: frozenset[str] = static()
