"""Calls of ring attention on rings of host devices, and the family's own answers for them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel.families.ring_attention import RingAttention, reference
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.tiled_attention.config import GradientTile, TpuBackward, TpuForward

FORWARD = TpuForward(block_q=128, block_kv=128, chunk_q=128, chunk_kv=128)
BACKWARD = TpuBackward(
    dkv=GradientTile(block_q=128, block_kv=128), dq=GradientTile(block_q=128, block_kv=128), chunk=128
)
FIELDS = ("query", "key", "value", "bias", "score_mod", "softmax_aux")
COTANGENTS = ("cotangent", "lse_cotangent")
ROWS = P(None, None, "sp")
SPREAD = {"bias": ROWS, "mask": ROWS, "lse_cotangent": ROWS, "softmax_aux": P(), "score_mod": P()}
OUTPUTS = P(None, "sp"), P(None, None, "sp")


def arrays(shape, **others):
    """query, key and value of (B, T, H, Hk, D, Dv), cotangents, and other arrays, of the whole sequence."""
    b, t, h, g, d, v = shape
    random = np.random.default_rng(0)
    sizes = {"query": (b, t, h, d), "key": (b, t, g, d), "value": (b, t, g, v), "cotangent": (b, t, h, v)}
    sizes["lse_cotangent"] = (b, h, t)
    made = {name: jnp.asarray(random.normal(size=size), jnp.float32) for name, size in sizes.items()}
    return made | {name: jax.tree.map(jnp.asarray, x) for name, x in others.items()}


def spread(function, size, given, outputs):
    """Calls a function of a dict of parts on every device of a ring."""
    mesh = jax.make_mesh((size,), ("sp",), (AxisType.Auto,), devices=jax.devices()[:size])
    specs = {name: SPREAD.get(name, P(None, "sp")) for name in given}
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(specs,), out_specs=outputs, check_vma=False)
    return jax.block_until_ready(jax.jit(mapped)(given))


def record(given, **options):
    """The record of one device's part."""
    given = {name: x for name, x in given.items() if name not in COTANGENTS}
    return RingAttention(**given, softmax_scale=given["query"].shape[3] ** -0.5, axis_name="sp", **options)


def both(forward, backward, size, given, **options):
    """Output, lse, and every gradient."""
    wanted = [name for name in FIELDS if name in given]

    def run(given):
        part = record(given, **options)
        output, residuals = forward(part, FORWARD)
        cotangents = {name: given[name] for name in COTANGENTS}
        pullback = Pullback(
            record=part, residuals=residuals, output=output, grad_fields=frozenset(wanted), **cotangents
        )
        return (output, residuals.lse), _summed(backward(pullback, BACKWARD))

    return spread(run, size, given, (OUTPUTS, _specs(wanted)))


def answers(size, given, **options):
    """The same by the family's reference."""
    wanted = [name for name in FIELDS if name in given]

    def run(given):
        def outcome(fields):
            output, residuals = reference(record({**given, **fields}, **options))
            return output, residuals.lse

        results, pull = jax.vjp(outcome, {name: given[name] for name in wanted})
        return results, _summed(pull(tuple(given[name] for name in COTANGENTS))[0])

    return spread(run, size, given, (OUTPUTS, _specs(wanted)))


def _summed(gradients):
    return gradients | {
        name: jax.tree.map(lambda y: jax.lax.psum(y, "sp"), x)
        for name, x in gradients.items()
        if name in ("softmax_aux", "score_mod")
    }


def _specs(names):
    return {name: SPREAD.get(name, P(None, "sp")) for name in names}


def ids(*lengths):
    """Segments of the given lengths, the last of which is padding."""
    made = [np.full(n, -1 if i + 1 == len(lengths) else i, np.int32) for i, n in enumerate(lengths)]
    return np.concatenate(made)[None]


def alike(got, wanted):
    """Asserts equality of two trees up to rounding."""
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=3e-5, atol=3e-5), got, wanted)
