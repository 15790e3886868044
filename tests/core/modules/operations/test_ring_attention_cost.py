"""What a ring costs: memory and messages, and that all devices have the same work."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring_calls
from jax.sharding import PartitionSpec as P
from ring_calls import on, ring
from ring_messages import assert_fewest_sends, count_sends

from ejkernel.families.ring_attention import RingAttention
from ejkernel.families.ring_attention.schedule import local_record, ring_of, step_record, travelling_keys_of
from ejkernel.modules import ring_attention
from ejkernel_xla.tiled_attention.kernels.key_tiles import find_key_tiles
from ejkernel_xla.tiled_attention.plan import make_plan

LENGTH = 16384


def program(size, length=LENGTH, gradients=True):
    """The call over a ring or, with its gradients, the gradient with respect to query, key and value; compiled."""
    shapes = [jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32) for heads in (2, 1, 1)]
    call = functools.partial(ring_attention, cfg=ring_calls.tiles(64, 64), causal=True, **on(ring(size)))

    def loss(*arrays):
        return jnp.sum(call(*arrays) ** 2)

    return jax.jit(jax.grad(loss, (0, 1, 2)) if gradients else call).lower(*shapes).compile(ring_calls.QUICK)


@pytest.fixture(scope="module")
def programs():
    return {size: program(size) for size in (1, 2, 4)}


@pytest.fixture(scope="module")
def forward_programs():
    return {size: program(size, gradients=False) for size in (1, 2, 4)}


# Beside its parts of the arrays, a device of a causal ring holds those parts in zig-zag placement, the keys and values
# in flight, and what is merged: a step's float32 output and the sum of those before. That is up to as much again, or
# twice as much in a forward pass, where little else is held. All of it is a part: it falls as the devices grow.
@pytest.mark.parametrize(("passes", "most"), [("programs", 1.9), ("forward_programs", 3.0)])
def test_memory_of_a_device_is_its_share_as_the_ring_grows(passes, most, request):
    found = {size: one.memory_analysis() for size, one in request.getfixturevalue(passes).items()}
    whole = {
        size: x.argument_size_in_bytes + x.output_size_in_bytes + x.temp_size_in_bytes for size, x in found.items()
    }
    for size, memory in found.items():
        assert memory.argument_size_in_bytes == found[1].argument_size_in_bytes / size
        assert memory.output_size_in_bytes <= found[1].output_size_in_bytes / size + 64  # gradients are a tuple
        if size > 1:
            assert whole[size] <= most * whole[1] / size
            assert whole[size] <= 1.15 * whole[2] * 2 / size


def test_no_device_holds_its_rows_of_scores(programs):
    assert programs[4].memory_analysis().temp_size_in_bytes < LENGTH * LENGTH / 8  # a sixteenth of them


def test_keys_travel_and_are_never_gathered(programs):
    for text in (programs[size].as_text() for size in (2, 4)):
        assert "collective-permute" in text
        assert not re.search(r"all-gather|all-to-all", text)


def test_memory_is_linear_in_the_length(programs):
    short = program(4, LENGTH // 2).memory_analysis().temp_size_in_bytes
    assert short < programs[4].memory_analysis().temp_size_in_bytes <= 2.1 * short


def permutations(size, **options):
    """How often the loops of a forward pass send keys, as (sends outside of loops, sends in loops times rounds)."""
    arrays = [jax.ShapeDtypeStruct((1, 64, 2, 8), jnp.float32)] * 3
    jaxpr = jax.make_jaxpr(functools.partial(ring_attention, **on(ring(size)), **options))(*arrays)
    return count_sends(jaxpr.jaxpr)


def test_as_many_messages_as_needed():
    assert permutations(1, causal=True) == 0
    assert_fewest_sends(permutations)


def test_the_next_keys_are_on_their_way_while_a_device_computes():
    """In the loop, what is sent is what came in: it waits for nothing that the round computes."""
    arrays = [jax.ShapeDtypeStruct((1, 64, 2, 8), jnp.float32)] * 3
    call = functools.partial(ring_attention, **on(ring(8)))
    jaxpr = jax.make_jaxpr(jax.grad(lambda *x: jnp.sum(call(*x)), (0, 1, 2)))(*arrays)
    bodies = list(_loops_that_send(jaxpr.jaxpr))
    assert len(bodies) == 2  # forward, backward
    for body in bodies:
        sent = [e for e in body.eqns if e.primitive.name == "ppermute"]
        assert sent
        assert all(variable in body.invars for e in sent for variable in e.invars)


def _loops_that_send(jaxpr):
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for one in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(one, "jaxpr", one)
                if hasattr(inner, "eqns"):
                    if equation.primitive.name == "scan" and any(e.primitive.name == "ppermute" for e in inner.eqns):
                        yield inner
                    yield from _loops_that_send(inner)


def visited_tiles(size, length, block, **options):
    """[device, round]: key tiles that a device's query tiles visit."""

    def count(query):
        record = RingAttention(query=query, key=query, value=query, softmax_scale=1.0, axis_name="sp", **options)
        around = ring_of(record)
        local, me = local_record(record, around), jax.lax.axis_index("sp")
        totals = []
        for hop in range(around.num_before + 1):
            met = step_record(local, around, (me - hop) % size, travelling_keys_of(local))
            key_tiles = find_key_tiles(met, make_plan(met, block, block))
            totals.append(jnp.sum(key_tiles.last - key_tiles.first))
        return jnp.stack(totals)[None]

    mapped = jax.shard_map(count, mesh=ring(size), in_specs=P(None, "sp"), out_specs=P("sp"), check_vma=False)
    return np.asarray(jax.jit(mapped, compiler_options=ring_calls.QUICK)(jnp.zeros((1, length, 1, 4))))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_causal_mask_gives_all_devices_the_same_work_in_every_round(size):
    length = 32 * size  # halves of parts are two tiles of 8
    found = visited_tiles(size, length, 8, causal=True)
    assert (found == found[0]).all()
    tiles = length // 8
    assert found.sum() == tiles * (tiles + 1) // 2  # every tile that is not wholly masked, and no other
    # As it were without the exchange: the last device would have size times the work of the first.
    uneven = visited_tiles(size, length, 8, causal=True, sliding_window=(length, 0)).sum(axis=1)
    assert uneven.sum() == found.sum()
    assert uneven[-1] > found.sum(axis=1).max()


def test_parts_that_a_window_does_not_reach_are_not_visited():
    found = visited_tiles(4, 128, 8, causal=True, sliding_window=(8, 0))
    assert found.shape == (4, 2)
    assert found[:, 1].tolist() == [0, 1, 1, 1]
