"""Backward pass of RWKV-4's weighted average: the scan again, and back from the last token to the first."""

import jax
import jax.numpy as jnp

from ejkernel.families.wkv import State, first_state
from ejkernel.types.pullback import Pullback
from ejkernel_xla.wkv.config import TokenLoop
from ejkernel_xla.wkv.forward import scan_tokens


def backward(pullback: Pullback, config: TokenLoop) -> dict[str, jax.Array]:
    """Returns gradients of the requested fields of a record.

    Args:
        pullback: Record, cotangents of output and final state, and the requested names.
        config: Tokens per iteration.

    Returns:
        Each requested gradient, in its field's shape and dtype.
    """
    record, (outputs, finals) = pullback.record, pullback.cotangent

    def run(parameters: tuple[jax.Array, jax.Array], tokens: tuple[jax.Array, jax.Array], state: State) -> object:
        return scan_tokens(parameters, tokens, state, record, config)

    _, pull = jax.vjp(run, (record.decay, record.bonus), (record.key, record.value), first_state(record))
    parameters, tokens, state = pull((outputs, (finals[:, 0], finals[:, 1], finals[:, 2])))
    grads: dict[str, jax.Array] = {"decay": parameters[0], "bonus": parameters[1], "key": tokens[0], "value": tokens[1]}
    grads["initial_state"] = jnp.stack(state, axis=1)
    return {name: grads[name].astype(getattr(record, name).dtype) for name in sorted(pullback.grad_fields)}
