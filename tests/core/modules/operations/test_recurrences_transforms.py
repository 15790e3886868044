"""The recurrences under JAX's transformations, and on a mesh of eight forced host devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformed
from jax.sharding import PartitionSpec as P

from ejkernel.modules import (
    GatedDeltaRuleConfig,
    GLAttentionConfig,
    KernelDeltaAttentionConfig,
    RecurrentAttentionConfig,
    StateSpaceV2Config,
    gated_delta_rule,
    gated_linear_attention,
    kernel_delta_attention,
    lightning_attention,
    ragged_gated_delta_rule,
    recurrent_attention,
    state_space_v2,
)

B, T, H, G, K, V = 2, 6, 4, 2, 3, 2


def arrays(seed):
    """Arrays of a call by name; every seed gives other values."""
    keys = iter(jax.random.split(jax.random.key(seed), 12))

    def normal(*shape):
        return jax.random.normal(next(keys), shape)

    return {
        "query": normal(B, T, H, K),
        "key": normal(B, T, G, K),
        "value": normal(B, T, G, V),
        "gate": -jnp.abs(normal(B, T, H)),
        "channels": -jnp.abs(normal(B, T, H, K)),
        "gamma": -jnp.abs(normal(H)),
        "beta": jax.nn.sigmoid(normal(B, T, H)),
        "state": normal(B, H, K, V),
        "states": normal(3, H, K, V),
        "lengths": jnp.array([[0, 1, 1, 6], [0, 2, 5, 5]][seed], jnp.int32),
        "ids": jnp.array([[[0, 0, 1, 1, -1, 1]] * B, [[-1, 0, 0, 0, 2, 2]] * B][seed], jnp.int32),
        "slots": jnp.array([[2, 0, 1], [0, 1, 2]][seed], jnp.int32),
    }


def _packed(query, key, value, channels, gamma, states, lengths):
    options = {"return_state": True, "cfg": RecurrentAttentionConfig(block_q=2)}
    tokens = (x[:1] for x in (query, key, value, channels))
    return recurrent_attention(*tokens, gamma, None, None, states, lengths, **options)


def _gla(query, key, value, gate):
    return gated_linear_attention(query, key, value, gate, cfg=GLAttentionConfig(block_q=4))


def _lightning(query, key, value, state):
    return lightning_attention(query, key, value, state, layer_idx=1, num_layers=3, return_state=True)


def _kda(query, key, value, beta, channels):
    return kernel_delta_attention(query, key, value, beta, channels, cfg=KernelDeltaAttentionConfig(chunk_size=4))


def _gdr(query, key, value, beta, gate, ids, state):
    options = {"return_state": True, "cfg": GatedDeltaRuleConfig(chunk_size=4)}
    return gated_delta_rule(query, key, value, beta, gate, ids, state, **options)


def _ragged(query, key, value, beta, gate, states, lengths, slots):
    tokens = (x[0] for x in (query, key, value, beta, gate))
    return ragged_gated_delta_rule(*tokens, states, lengths, slots, chunk_size=2)


def _space(query, key, beta, gamma, value):
    x = jnp.repeat(value, H // G, axis=2)
    y, state, _ = state_space_v2(x, gamma, key, key, gamma, beta, cfg=StateSpaceV2Config(chunk_size=4))
    return y * query.sum(axis=(2, 3))[..., None], state


CALLS = {call.__name__.strip("_"): call for call in (_packed, _gla, _lightning, _kda, _gdr, _ragged, _space)}


def given(call, seed):
    names = call.__code__.co_varnames[: call.__code__.co_argcount]
    every = arrays(seed)
    found = [every[name] for name in names]
    return found, [n for n, x in enumerate(found) if jnp.issubdtype(x.dtype, jnp.floating)]


@pytest.mark.parametrize("name", CALLS)
def test_transforms(name):
    call = CALLS[name]
    (first, floats), (second, _) = given(call, 0), given(call, 1)
    transformed.check_transforms(call, first, floats, second)


@pytest.mark.parametrize("name", ["packed", "ragged", "gdr"])
def test_new_values_do_not_recompile(name):
    call = CALLS[name]
    transformed.check_no_new_compilations(jax.jit(call), given(call, 0)[0], given(call, 1)[0])


@pytest.mark.parametrize("name", ["packed", "ragged"])
def test_constant_lengths_are_kept_from_constant_folding(name):
    """XLA for GPUs fails to compile loops over chunks whose offsets it tries to evaluate from constants."""
    found, floats = given(CALLS[name], 0)

    def call(*floating):
        given_floats = dict(zip(floats, floating, strict=True))
        return CALLS[name](*(given_floats.get(n, x) for n, x in enumerate(found)))

    def both(*floating):
        made, pull = jax.vjp(call, *floating)
        return pull(made)

    program = jax.jit(jax.vmap(both)).lower(*(jnp.stack([found[n]] * 2) for n in floats)).as_text()
    assert len(re.findall(r"stablehlo.optimization_barrier .*tensor<4xi32>", program)) == 2, "one a pass"


def mesh():
    return jax.make_mesh((2, 2, 2), ("dp", "sp", "tp"))


ROWS, STATES = P("dp", None, "tp"), P("dp", "tp")
TOKENS = P(None, None, "tp")

# function, names of its arrays, specs of those, specs of what it returns, options
SPLIT = {
    "recurrent": (
        recurrent_attention,
        ("query", "key", "value", "channels", "gamma", None, None, "state"),
        (ROWS, ROWS, ROWS),
        (ROWS, STATES),
        {"return_state": True},
    ),
    "gla, output alone": (
        gated_linear_attention,
        ("query", "key", "value", "gate"),
        (ROWS, ROWS, ROWS, ROWS),
        ROWS,
        {},
    ),
    "packed, heads": (
        gated_linear_attention,
        ("query row", "key row", "value row", "channels row", None, "states", "lengths"),
        (TOKENS, TOKENS, TOKENS),
        (TOKENS, P(None, "tp")),
        {"return_state": True},
    ),
    "lightning, slopes of all heads": (
        lightning_attention,
        ("query", "key", "value"),
        (ROWS, ROWS, ROWS),
        ROWS,
        {"layer_idx": 0, "num_layers": 2},
    ),
    "kda": (kernel_delta_attention, ("query", "key", "value", "beta", "channels"), (ROWS,) * 4, ROWS, {}),
    "gdr": (
        gated_delta_rule,
        ("query", "key", "value", "beta", "gate", "ids", "state"),
        (ROWS, ROWS, ROWS, ROWS, ROWS, P("dp", None)),
        (ROWS, STATES),
        {"return_state": True},
    ),
    "ragged, heads": (
        ragged_gated_delta_rule,
        ("flat query", "flat key", "flat value", "flat beta", "flat gate", "states", "lengths", "slots"),
        (P(None, "tp"),) * 5 + (None,) * 3,
        (P(None, "tp"), P(None, "tp")),
        {},
    ),
    "state space": (
        state_space_v2,
        ("x", "gamma", "key", "key", "gamma", "beta"),
        (ROWS, None, ROWS, ROWS, None, ROWS),
        (ROWS, STATES),
        {},
    ),
}


def named(every, name):
    if name is None or name in every:
        return every.get(name)
    if name == "x":
        return jnp.repeat(every["value"], H // G, axis=2)
    kind, _, field = name.partition(" ")
    return every[field][0] if kind == "flat" else every[kind][:1]


@pytest.mark.parametrize("name", SPLIT)
def test_split_over_devices_the_call_means_the_same(name):
    function, names, in_specs, out_specs, options = SPLIT[name]
    every = [named(arrays(0), field) for field in names]
    floats = [n for n, x in enumerate(every) if x is not None and jnp.issubdtype(x.dtype, jnp.floating)]

    def run(**placed):
        def call(*some):
            filled = list(every)
            for n, x in zip(floats, some, strict=True):
                filled[n] = x
            return function(*filled, **options, **placed)

        graded = transformed.graded(lambda *some: jax.tree.leaves(call(*some)), range(len(floats)))
        return transformed.quickly(graded)(*(every[n] for n in floats))

    split = run(mesh=mesh(), in_specs=in_specs, out_specs=out_specs)
    transformed.close(split, run(), rtol=1e-4, atol=1e-5)


def test_channels_cannot_be_split_and_specs_must_agree():
    every = arrays(0)
    call = functools.partial(recurrent_attention, every["query"], every["key"], every["value"], mesh=mesh())
    channels = P(None, None, None, "sp")
    with pytest.raises(ValueError, match="axis 'k' of query cannot be split"):
        call(in_specs=(channels, channels, P()), out_specs=P())
    with pytest.raises(ValueError, match="out_specs: the inputs' specs make the output"):
        call(in_specs=(ROWS, ROWS, ROWS), out_specs=P())
    with pytest.raises(ValueError, match="returns at most 2 arrays"):
        call(in_specs=(ROWS, ROWS, ROWS), out_specs=(ROWS, STATES, ROWS))


def test_one_row_of_packed_sequences_cannot_be_split_into_rows():
    every = arrays(0)
    tokens = [every[name][:1] for name in ("query", "key", "value")]
    with pytest.raises(ValueError, match="'b' of size 1 does not divide"):
        gated_linear_attention(
            *tokens, cu_seqlens=every["lengths"], mesh=mesh(), in_specs=(ROWS, ROWS, ROWS), out_specs=ROWS
        )


def test_arrays_placed_on_the_mesh_stay_there():
    every = arrays(0)
    placed = [jax.device_put(every[n], jax.NamedSharding(mesh(), ROWS)) for n in ("query", "key", "value")]
    output = gated_linear_attention(*placed, mesh=mesh(), in_specs=(ROWS, ROWS, ROWS), out_specs=ROWS)
    assert output.sharding.is_equivalent_to(jax.NamedSharding(mesh(), ROWS), 4)
    np.testing.assert_allclose(output, _plain(every), rtol=1e-5, atol=1e-5)


def _plain(every):
    return gated_linear_attention(every["query"], every["key"], every["value"])
