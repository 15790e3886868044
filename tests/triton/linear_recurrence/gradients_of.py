"""The backward pass that follows a forward pass, without the engine between them."""

from ejkernel.types.pullback import Pullback


def gradients_of(record, results, backward, config, grad_fields, cotangent=None):
    """Returns the gradients of a call.

    Args:
        record: Its arguments.
        results: What the forward function returned: (output, residuals, private residuals).
        backward: Maps a pullback and a config to the gradients.
        config: What the backward pass is run with.
        wanted: The names of the gradients.
        cotangent: Of the output; None takes the output itself.
    """
    output, residuals, private = results
    pullback = Pullback(
        record=record,
        residuals=residuals,
        output=output,
        cotangent=output if cotangent is None else cotangent,
        grad_fields=frozenset(grad_fields),
        private_residuals=private,
    )
    return backward(pullback, config)
