"""Memory of `flash_attention`: linear in the sequence length, forward and backward, whatever the options."""

import re

import flash_calls
import jax
import jax.numpy as jnp
import pytest

from ejkernel.modules import flash_attention
from ejkernel.types import MaskInfo

LENGTHS = (3072, 6144)
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"sliding_window": (100, 0)},
    "dropout": {"dropout_prob": 0.1, "dropout_seed": 3},
    "capped numerator": {"logits_soft_cap": 5.0, "normalize_output": False},
}
FIELDS = {
    "full": (),
    "causal": ("segments", "softmax_aux"),
    "window": ("lengths",),
    "dropout": ("bias of keys",),
    "capped numerator": (),
}


def compiled(name, length):
    """The gradient with respect to every floating argument of a call of the given length, compiled."""
    floats = {field: jnp.zeros((1, length, heads, 16)) for field, heads in (("query", 2), ("key", 1), ("value", 1))}
    if "softmax_aux" in FIELDS[name]:
        floats["softmax_aux"] = jnp.zeros((2, 3))
    if "bias of keys" in FIELDS[name]:
        floats["bias"] = jnp.zeros((1, 2, 1, length))
    ids, lengths = jnp.zeros((1, length), jnp.int32), jnp.array([0, 700, length], jnp.int32)

    def loss(floats, ids, lengths):
        info = MaskInfo.from_segments(ids) if "segments" in FIELDS[name] else None
        cum = lengths if "lengths" in FIELDS[name] else None
        arrays = (floats["query"], floats["key"], floats["value"], floats.get("bias"), cum, None)
        output = flash_attention(*arrays, floats.get("softmax_aux"), mask_info=info, **OPTIONS[name])
        return jnp.sum(output**2)

    return jax.jit(jax.value_and_grad(loss)).lower(floats, ids, lengths).compile(flash_calls.QUICK)


@pytest.mark.parametrize("name", OPTIONS)
def test_temporary_memory_of_the_gradient_grows_linearly_and_nothing_is_square(name):
    programs = [compiled(name, length) for length in LENGTHS]
    short, long = (program.memory_analysis().temp_size_in_bytes for program in programs)
    assert short < long <= 2.1 * short  # square would be 4
    assert long < LENGTHS[-1] ** 2  # a quarter of one float32 matrix of scores
    shapes = re.findall(r"\w+\[([\d,]+)\]", programs[-1].as_text())
    sizes = [[int(size) for size in shape.split(",")] for shape in shapes]
    assert sizes
    assert not [shape for shape in sizes if sum(size >= LENGTHS[-1] for size in shape) > 1]
