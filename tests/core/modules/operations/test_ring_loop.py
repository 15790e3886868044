"""The ring loop that GPU backends share, with XLA's tiled attention as the kernel of its steps."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring_calls
from jax.sharding import PartitionSpec as P
from ring_calls import IDS, PLACES, QUICK, ring
from ring_messages import assert_fewest_sends, count_sends

from ejkernel.families import tiled_attention
from ejkernel.families.ring_attention import RingAttention, as_tiled_attention
from ejkernel.families.ring_attention import loop as ring_loop
from ejkernel.families.ring_attention.steps import abstract_steps, ring_kind, ring_of_steps
from ejkernel.types.pullback import Pullback
from ejkernel_xla.tiled_attention import backward as tiled_backward
from ejkernel_xla.tiled_attention import forward as tiled_forward
from ejkernel_xla.tiled_attention.config import ChunkedSoftmax

T, H = ring_calls.T, ring_calls.H
CONFIGS = (ChunkedSoftmax(block_q=8, block_kv=8),) * 2
KERNEL = ring_loop.StepKernel(tiled_forward.forward, tiled_backward.backward)
SPECS = {
    "query": P(None, "sp"),
    "key": P(None, "sp"),
    "value": P(None, "sp"),
    "q_segment_ids": P(None, "sp"),
    "kv_segment_ids": P(None, "sp"),
    "q_positions": P(None, "sp"),
    "kv_positions": P(None, "sp"),
    "bias": P(None, None, "sp"),
    "mask": P(None, None, "sp"),
    "softmax_aux": P(),
}
SEGMENTS = {"q_segment_ids": IDS, "kv_segment_ids": IDS}
SINKS = {"softmax_aux": jnp.linspace(-1.0, 2.0, H)}
BIAS = {"bias": jnp.asarray(ring_calls.floats(bias=(1, H, T, T))[4], jnp.float32)}


def make(t=T, s=T, **options):
    query, key, value = (jnp.asarray(x, jnp.float32) for x in ring_calls.floats(t=t, s=s)[:3])
    return RingAttention(query=query, key=key, value=value, softmax_scale=0.3, axis_name="sp", **options)


def on_devices(mesh, run, record, *others):
    """run(record, *others) on every device of a ring, rows of queries and keys spread over it."""
    fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    arrays = {name: x for name, x in fields.items() if name in SPECS and x is not None}

    def inside(arrays, *others):
        return run(dataclasses.replace(record, **arrays), *others)

    gradients = {name: SPECS[name] for name in arrays}
    return functools.partial(
        jax.shard_map(
            inside,
            mesh=mesh,
            in_specs=(gradients, *(P(None, "sp") for _ in others)),
            out_specs=(P(None, "sp"), P(None, None, "sp"), {"q": gradients}),
            check_vma=False,
        ),
        arrays,
        *others,
    )


def both_passes(record, cotangent):
    output, residuals = ring_loop.forward(record, CONFIGS[0], KERNEL)
    wanted = frozenset(tiled_attention.FAMILY.differentiable) & {
        name for name in SPECS if getattr(record, name) is not None
    }
    made = {"residuals": residuals, "output": output}
    saved = Pullback(
        record=record, cotangent=cotangent, lse_cotangent=of_lse(residuals.lse), grad_fields=wanted, **made
    )
    gradients = dict(ring_loop.backward(saved, CONFIGS[1], KERNEL))
    if "softmax_aux" in gradients:
        gradients["softmax_aux"] = jax.lax.psum(gradients["softmax_aux"], "sp")
    others = {name: jnp.zeros_like(getattr(record, name)) for name in SPECS if getattr(record, name) is not None}
    return output, residuals.lse, {"q": {**others, **gradients}}


def of_lse(lse):
    """A cotangent of lse that is alike wherever a row is computed."""
    return jnp.where(jnp.isfinite(lse), jnp.sin(lse), 1.0)


def wanted(record, cotangent):
    """The family's reference on the whole, differentiated by JAX."""
    whole = as_tiled_attention(record)
    names = [n for n in tiled_attention.FAMILY.differentiable if getattr(whole, n) is not None]

    def run(given):
        output, residuals = tiled_attention.reference(dataclasses.replace(whole, **given))
        return output, residuals.lse

    (output, lse), pull, *_ = jax.vjp(run, {name: getattr(whole, name) for name in names})
    (gradients,) = pull((cotangent, of_lse(lse)))
    return output, lse, gradients


CASES = {
    "full": ({}, "full", (2, 8)),
    "full, segments, sinks": ({**SEGMENTS, **SINKS}, "full", (4,)),
    "full, bias": ({**BIAS}, "full", (4,)),
    "causal": ({"causal": True}, "zig-zag", (2, 8)),
    "causal, segments, sinks, cap": (
        {"causal": True, "logits_soft_cap": 2.0, **SEGMENTS, **SINKS},
        "zig-zag",
        (2, 4),
    ),
    "causal, bias": ({"causal": True, **BIAS}, "positioned", (4,)),
    "window before": ({"sliding_window": (6, 0), "causal": True, **SINKS}, "banded", (2, 8)),
    "window after": ({"sliding_window": (0, 9), **SEGMENTS}, "banded", (4,)),
    "window": ({"sliding_window": (11, 5)}, "banded", (2, 8)),
    "window of everything": ({"sliding_window": (40, 30)}, "banded", (4,)),
    "window open after": ({"sliding_window": (3, None)}, "banded", (4,)),
    "positions": ({"causal": True, "q_positions": PLACES, "kv_positions": PLACES[:, ::-1]}, "positioned", (4,)),
    "unequal, causal": ({"causal": True, "s": 2 * T}, "positioned", (4,)),
    "odd, causal": ({"causal": True, "t": 36, "s": 36}, "banded", (4,)),
}


@pytest.mark.parametrize(("name", "size"), [(name, size) for name, (_, _, sizes) in CASES.items() for size in sizes])
def test_values_lse_and_gradients_are_those_of_the_whole(name, size):
    options, kind, _ = CASES[name]
    record = make(**options)
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=(2, record.query.shape[1], H, 12)), jnp.float32)
    kinds = []

    def run(record, cotangent):
        kinds.append(ring_kind(record, ring_of_steps(record)))
        return both_passes(record, cotangent)

    call = on_devices(ring(size), run, record, cotangent)
    output, lse, gradients = jax.jit(call, compiler_options=QUICK)()
    assert set(kinds) == {kind}
    expected, expected_lse, expected_gradients = wanted(record, cotangent)
    np.testing.assert_allclose(output, expected, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-5, atol=2e-6)
    for field, gradient in expected_gradients.items():
        np.testing.assert_allclose(gradients["q"][field], gradient, rtol=2e-5, atol=1e-5, err_msg=field)


def program(size, length, **options):
    """Both passes over a ring, compiled."""
    sizes = {"query": 2, "key": 1, "value": 1}
    arrays = {name: jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32) for name, heads in sizes.items()}
    part = P(None, "sp")

    def inside(arrays, cotangent):
        record = RingAttention(**arrays, softmax_scale=0.3, axis_name="sp", **options)
        output, residuals = ring_loop.forward(record, WIDE[0], KERNEL)
        saved = Pullback(
            record=record, residuals=residuals, output=output, cotangent=cotangent, grad_fields=frozenset(arrays)
        )
        return output, ring_loop.backward(saved, WIDE[1], KERNEL)

    mapped = jax.shard_map(inside, mesh=ring(size), in_specs=part, out_specs=part, check_vma=False)
    return jax.jit(mapped).lower(arrays, arrays["query"]).compile(QUICK)


WIDE = (ChunkedSoftmax(block_q=64, block_kv=64),) * 2
LENGTH = 8192


@pytest.fixture(scope="module")
def programs():
    return {size: program(size, LENGTH, causal=True) for size in (4, 8)}


def test_memory_of_a_device_halves_as_the_devices_double(programs):
    four, eight = (programs[size].memory_analysis() for size in (4, 8))
    assert eight.argument_size_in_bytes == four.argument_size_in_bytes / 2
    assert eight.temp_size_in_bytes <= 1.1 * four.temp_size_in_bytes / 2
    assert eight.temp_size_in_bytes < LENGTH * LENGTH / 8  # a quarter of a device's rows of scores


def test_keys_travel_and_are_never_gathered(programs):
    for one in programs.values():
        assert "collective-permute" in one.as_text()
        assert not re.search(r"all-gather|all-to-all", one.as_text())


def sends(size, **options):
    """How often a forward pass sends arrays, those in loops as often as they go around."""
    part = P(None, "sp")

    def inside(query, key, value):
        fields = {"query": query, "key": key, "value": value}
        return ring_loop.forward(
            RingAttention(**fields, softmax_scale=0.3, axis_name="sp", **options), CONFIGS[0], KERNEL
        )[0]

    mapped = jax.shard_map(inside, mesh=ring(size), in_specs=part, out_specs=part, check_vma=False)
    return count_sends(jax.make_jaxpr(mapped)(*[jax.ShapeDtypeStruct((1, 64, 2, 8), jnp.float32)] * 3).jaxpr)


def test_as_many_messages_as_needed():
    assert_fewest_sends(sends)


def steps(size, length, **options):
    """The calls of tiled attention of a ring: (queries, keys, band) of each kind."""
    found = []

    def inside(query):
        record = RingAttention(query=query, key=query, value=query, softmax_scale=1.0, axis_name="sp", **options)
        calls = abstract_steps(record)
        found.extend((x.query.shape[:2], x.key.shape[:2], tiled_attention.causal_window_bounds(x)) for x in calls)
        return query

    mapped = jax.shard_map(inside, mesh=ring(size), in_specs=P(None, "sp"), out_specs=P(None, "sp"))
    jax.eval_shape(mapped, jax.ShapeDtypeStruct((1, length, 1, 4), jnp.float32))
    return found


def test_a_causal_mask_gives_all_devices_the_same_work_in_every_step():
    own, other = steps(4, 128, causal=True)
    assert own == ((1, 32), (1, 32), (None, 0))
    # Two full blocks of half the queries and half the keys: as many pairs as those below a diagonal.
    assert other == ((2, 16), (2, 16), (None, None))


def test_a_window_leaves_steps_the_corner_that_it_reaches():
    before = (((1, 6), (1, 6), (0, None)), ((1, 32), (1, 32), (6, None)))
    assert steps(4, 128, causal=True, sliding_window=(6, 0)) == [((1, 32), (1, 32), (6, 0)), before[0]]
    assert steps(4, 128, sliding_window=(6, 3))[1:] == [before[0], ((1, 3), (1, 3), (None, 0))]
    assert steps(4, 128, sliding_window=(38, 0))[1:] == [before[1], before[0]]
