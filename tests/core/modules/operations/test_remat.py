"""`save_only_these_names` keeps an operation's forward pass from running again."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import flash_attention, gla_attention

KEEP = jax.checkpoint_policies.save_only_these_names
NAMES = ("ejkernel_out", "ejkernel_lse", "ejkernel_state", "ejkernel_private")


def normal(*shape):
    return jax.random.normal(jax.random.key(len(shape)), shape)


def attention(x):
    return flash_attention(x, jnp.sin(x), jnp.cos(x), causal=True, platform="xla")


def recurrence(x):
    return gla_attention(x, jnp.sin(x), jnp.cos(x), -jnp.square(x), platform="xla")


OPERATIONS = {"flash_attention": attention, "gla_attention": recurrence}


def gradient(function, x, policy, transform=jax.grad):
    """With projections on both sides, whose gradients need the output too."""

    def layer(x, w):
        return jnp.sum(jnp.square(function(x @ w) @ w))

    return jax.jit(transform(jax.checkpoint(layer, policy=policy), argnums=(0, 1))), (
        x,
        normal(x.shape[-1], x.shape[-1]),
    )


def again(step, args) -> bool:
    """Whether the program runs a forward kernel among what it computes again."""
    text = step.lower(*args).compile().as_text()
    return re.search(r'"[^"]*rematted_computation[^"]*ejkernel\.\w+\.forward', text) is not None


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_forward_pass_runs_once_where_its_names_are_kept(name):
    x = normal(1, 32, 2, 16)
    without, args = gradient(OPERATIONS[name], x, None)
    kept, _ = gradient(OPERATIONS[name], x, KEEP(*NAMES))

    assert again(without, args)
    assert not again(kept, args)
    for got, want in zip(jax.tree.leaves(kept(*args)), jax.tree.leaves(without(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def test_fewer_loops_are_compiled_where_its_names_are_kept():
    x = normal(1, 2048, 1, 16)
    loops = {}
    for label, policy in (("nothing", None), ("names", KEEP(*NAMES))):
        step, args = gradient(attention, x, policy, jax.value_and_grad)
        loops[label] = step.lower(*args).as_text().count("stablehlo.while")

    assert loops["names"] < loops["nothing"]


def test_softmax_attention_needs_two_names():
    step, args = gradient(attention, normal(1, 32, 2, 16), KEEP("ejkernel_out", "ejkernel_lse"))
    assert not again(step, args)

    one, args = gradient(attention, normal(1, 32, 2, 16), KEEP("ejkernel_out"))
    assert again(one, args)
