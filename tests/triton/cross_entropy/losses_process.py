"""The loss kernels in Triton's interpreter, compared with the reference: vocabularies over devices, impossible entries,
and configurations that are not the default.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from ejkernel.families.cross_entropy import CrossEntropy, reference
from ejkernel.modules import fused_cross_entropy, fused_kl_divergence
from ejkernel.types.pullback import Pullback, run_both_passes
from ejkernel_triton.cross_entropy.backward import backward
from ejkernel_triton.cross_entropy.config import LossTiles
from ejkernel_triton.cross_entropy.forward import forward

TOKENS, CHANNELS, ENTRIES = 6, 8, 36
KEYS = jax.random.split(jax.random.key(0), 4)
LOGITS, TEACHER = 3 * jax.random.normal(KEYS[0], (2, TOKENS, ENTRIES))
HIDDEN, HEAD = jax.random.normal(KEYS[1], (TOKENS, CHANNELS)), jax.random.normal(KEYS[2], (CHANNELS, ENTRIES))
TARGETS = jnp.array([0, 35, 9, -100, 17, 8])
WEIGHTS = jnp.array([1.0, 0.5, 2.0, 1.0, 0.0, 1.0])


def head_loss(platform, axis, hidden, head):
    options = {"label_smoothing": 0.1, "z_loss": 1e-2, "logit_softcap": 8.0, "vocab_parallel_axis": axis}
    return fused_cross_entropy(
        None, TARGETS, WEIGHTS, hidden=hidden, lm_head_weight=head, platform=platform, **options
    ).loss


def divergence(direction):
    def loss(platform, axis, student, teacher):
        options = {"direction": direction, "temperature": 1.5, "beta": 0.3, "vocab_parallel_axis": axis}
        return fused_kl_divergence(student, teacher, WEIGHTS, platform=platform, **options).loss

    return loss


def a_vocabulary_over_devices_is_the_whole_one():
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    split = PartitionSpec(None, "tp")
    calls = [(head_loss, (PartitionSpec(), split), (HIDDEN, HEAD))]
    calls += [(divergence(name), (split, split), (LOGITS, TEACHER)) for name in ("forward", "reverse", "jsd")]
    for loss, specs, arrays in calls:

        def over_devices(*arrays, loss=loss, specs=specs):
            return jax.shard_map(
                lambda *parts: loss("triton", "tp", *parts), mesh=mesh, in_specs=specs, out_specs=PartitionSpec()
            )(*arrays)

        which = (0, 1) if loss is head_loss else 0
        got = jax.jit(jax.value_and_grad(over_devices, which))(*arrays)
        want = jax.jit(jax.value_and_grad(lambda *arrays, loss=loss: loss("xla", None, *arrays), which))(*arrays)
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-6), got, want)


def impossible_entries_count_nothing():
    """Logits of -inf in the middle of a tile, in whole tiles, and of the entries of one lane."""
    gone = jnp.isin(jnp.arange(ENTRIES), jnp.array([1, 2, 3, 4, 5, 6, 7, 14, 22, 30]))
    student, teacher = jnp.where(gone, -jnp.inf, LOGITS), jnp.where(gone, -jnp.inf, TEACHER)
    for direction in ("forward", "reverse", "jsd"):
        for got, want in zip(
            *(jax.value_and_grad(divergence(direction), 2)(name, None, student, teacher) for name in ("triton", "xla")),
            strict=True,
        ):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
    # No target is impossible.
    targets = jnp.where(gone[jnp.maximum(TARGETS, 0)], 0, TARGETS)
    for got, want in zip(
        *(
            jax.value_and_grad(lambda x, name=name: fused_cross_entropy(x, targets, platform=name).loss)(student)
            for name in ("triton", "xla")
        ),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def blocks_that_overlap_add_each_token_once():
    """Six tokens in blocks of four, logits in float32 or bfloat16, and sums in either."""
    record = CrossEntropy(
        inputs=HIDDEN.astype(jnp.bfloat16),
        targets=TARGETS.astype(jnp.int32),
        weights=jnp.where(TARGETS < 0, 0, WEIGHTS),
        lm_head=HEAD.astype(jnp.bfloat16),
        lm_head_bias=TEACHER[0],
        sum_over_tokens=True,
    )
    fields = ("inputs", "lm_head", "lm_head_bias")

    def loss(arrays):
        wide = {name: x.astype(jnp.float32) for name, x in arrays.items()}
        return reference(dataclasses.replace(record, **wide))[0][0][0]

    value, gradients = jax.value_and_grad(loss)({name: getattr(record, name) for name in fields})
    numbers = jnp.zeros(TOKENS)
    start = Pullback(
        record=record,
        residuals=None,
        output=None,
        cotangent=(jnp.ones(1), numbers, numbers, numbers),
        grad_fields=frozenset(fields),
    )
    for float32_logits in (False, True):
        for float32_sums in (False, True):
            tiles = LossTiles(
                block_t=4, block_v=8, num_warps=1, float32_logits=float32_logits, float32_sums=float32_sums
            )
            output, found = run_both_passes(forward, backward, start, tiles)
            np.testing.assert_allclose(output[0][0], value, rtol=2e-2)
            for name in fields:
                got, want = (np.asarray(x[name].astype(jnp.float32)) for x in (found, gradients))
                np.testing.assert_allclose(got, want, rtol=0, atol=2e-2 * np.abs(want).max())


if __name__ == "__main__":
    a_vocabulary_over_devices_is_the_whole_one()
    impossible_entries_count_nothing()
    blocks_that_overlap_add_each_token_once()
    print("right")
