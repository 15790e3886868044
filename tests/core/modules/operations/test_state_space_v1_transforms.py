"""`state_space_v1` under JAX's transformations, on a mesh of eight forced host devices, and what memory it takes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformed
from jax.sharding import PartitionSpec as P
from selective_scan_calls import WAYS, make

from ejkernel.modules import state_space_v1

EVERYTHING = ("gate", "initial_state")


@pytest.mark.parametrize("way", WAYS)
def test_transforms(way):
    shape = (2, 70, 3, 2, EVERYTHING)
    arrays, others = (list(make(*shape, seed, np.float32).values()) for seed in (0, 1))

    def call(*arrays):
        return state_space_v1(*arrays, cfg=WAYS[way])[:2]

    transformed.check_transforms(call, arrays, range(8), others)
    transformed.check_no_new_compilations(call, arrays, others)


@pytest.mark.parametrize("split", ["rows", "channels", "both"])
def test_shards_are_parts_of_the_whole(split):
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), devices=jax.devices(), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows, channels = (None if split == "channels" else "dp"), (None if split == "rows" else "tp")
    arrays = list(make(2, 66, 8, 3, EVERYTHING, dtype=np.float32).values())
    values = P(rows, None, channels)
    # What gate and initial_state are split by follows.
    in_specs = (values, P(channels), P(rows), P(rows), P(channels), values)
    placed = {"mesh": mesh, "in_specs": in_specs, "out_specs": (values, P(rows, channels))}

    def whole(*arrays):
        return state_space_v1(*arrays)[:2]

    def parts(*arrays):
        return state_space_v1(*arrays, **placed)[:2]

    got = transformed.quickly(transformed.graded(parts, range(8)))(*arrays)
    transformed.close(got, transformed.quickly(transformed.graded(whole, range(8)))(*arrays), 5e-5, 1e-5)


def test_states_cannot_be_split():
    mesh = jax.make_mesh((2,), ("dp",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    arrays = list(make(2, 8, 4, 4, dtype=np.float32).values())
    specs = [P(None, None, "dp") if n == 2 else P() for n in range(6)]
    with pytest.raises(ValueError, match=r"axis 'e' of .* cannot be split"):
        state_space_v1(*arrays, mesh=mesh, in_specs=specs, out_specs=(P(), P(), P()))


ROWS, CHANNELS, SIZE = 2, 32, 8


def abstract(tokens):
    """A call's arrays, gate and initial state included."""
    values, numbers = (ROWS, tokens, CHANNELS), (ROWS, tokens, SIZE)
    shapes = (values, (CHANNELS, SIZE), numbers, numbers, (CHANNELS,), values, values, (ROWS, CHANNELS, SIZE))
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


@pytest.mark.parametrize("way", WAYS)
def test_memory_grows_linearly_and_holds_no_state_of_every_token(way):
    def call(*arrays):
        return state_space_v1(*arrays, cfg=WAYS[way])[:2]

    graded = jax.jit(transformed.graded(call, range(8)))
    short, long = (graded.lower(*abstract(tokens)).compile() for tokens in (1024, 2048))
    used = long.memory_analysis().temp_size_in_bytes
    assert used <= 2.1 * short.memory_analysis().temp_size_in_bytes
    assert used < 2048 * ROWS * CHANNELS * SIZE * 4  # the states of all tokens
    shapes = re.findall(r"\w\d+\[([\d,]+)\]", long.as_text())
    assert max(np.prod([int(d) for d in shape.split(",")]) for shape in shapes) <= 2048 * ROWS * CHANNELS
