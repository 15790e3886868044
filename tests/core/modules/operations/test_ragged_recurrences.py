"""Recurrences of packed requests with states in slots: every request as if it were alone, and no other slot touched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import (
    gla_attention,
    kda_attention,
    lightning_attention,
    ragged_gated_delta_rule,
    state_space_v1,
    state_space_v2,
)
from ejkernel.modules.ragged import (
    ragged_gated_linear_attention,
    ragged_kernel_delta_attention,
    ragged_lightning_attention,
    ragged_state_space_v1,
    ragged_state_space_v2,
)

T, H, G, K, V, SLOTS = 12, 4, 2, 6, 5, 5
STARTS, INDICES = jnp.array([0, 5, 5, 6, 10]), jnp.array([3, 2, -1, 0])  # the second is empty, the third has no slot
RANDOM = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RANDOM.normal(size=shape), jnp.float32)


QKV = {"query": normal(T, H, K), "key": normal(T, G, K), "value": normal(T, G, V)}
GATES, BETA, DT = -jnp.square(normal(T, H, K)), jax.nn.sigmoid(normal(T, H)), jax.nn.softplus(normal(T, H))
SLOTS_KV, SLOTS_PE = normal(SLOTS, H, K, V), normal(SLOTS, H, V, K)
LAYER = {"layer_idx": 1, "num_layers": 4}
SSM = {"x": normal(T, H, V), "B": normal(T, G, K), "C": normal(T, G, K), "dt": DT}
A, D = -jnp.exp(normal(H)), normal(H)
PACKED = (STARTS, INDICES)


def alone_ssm(part, state):
    y, last, _ = state_space_v2(A=A, D=D, initial_state=state, **part)
    return y, last


ONE = {"hidden_states": normal(T, 6), "B": normal(T, 3), "C": normal(T, 3), "dt": jax.nn.softplus(normal(T, 6))}
ONE_A, ONE_D, SLOTS_IE = -jnp.exp(normal(6, 3)), normal(6), normal(SLOTS, 6, 3)


def alone_scan(part, state):
    y, last, _ = state_space_v1(A=ONE_A, D=ONE_D, initial_state=state, **part)
    return y, last


CASES = {
    "mamba 1": (
        lambda slots, *rest: ragged_state_space_v1(
            ONE["hidden_states"], ONE_A, ONE["B"], ONE["C"], ONE_D, ONE["dt"], slots, *rest
        ),
        alone_scan,
        ONE,
        SLOTS_IE,
    ),
    "gla": (
        lambda slots, *rest: ragged_gated_linear_attention(*QKV.values(), GATES, slots, *rest),
        lambda part, state: gla_attention(**part, initial_state=state, return_state=True),
        {**QKV, "g": GATES},
        SLOTS_KV,
    ),
    "lightning": (
        lambda slots, *rest: ragged_lightning_attention(*QKV.values(), slots, *rest, **LAYER),
        lambda part, state: lightning_attention(**part, initial_state=state, return_state=True, **LAYER),
        QKV,
        SLOTS_KV,
    ),
    "kda": (
        lambda slots, *rest: ragged_kernel_delta_attention(*QKV.values(), BETA, GATES, slots, *rest),
        lambda part, state: kda_attention(**part, initial_state=state, return_state=True),
        {**QKV, "beta": BETA, "decay": GATES},
        SLOTS_KV,
    ),
    "mamba 2": (
        lambda slots, *rest: ragged_state_space_v2(SSM["x"], A, SSM["B"], SSM["C"], D, DT, slots, *rest),
        alone_ssm,
        SSM,
        SLOTS_PE,
    ),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", CASES)
def test_every_request_continues_its_own_slot(name, jit):
    call, alone, tokens, slots = CASES[name]
    output, after = (jax.jit(call) if jit else call)(slots, *PACKED)
    want, expected = np.zeros(output.shape), np.array(slots)
    for n, index in enumerate(np.asarray(INDICES)):
        part = slice(int(STARTS[n]), int(STARTS[n + 1]))
        if part.start == part.stop:
            continue
        state = slots[None, index] if index >= 0 else jnp.zeros_like(slots[:1])
        row, last = alone({field: x[None, part] for field, x in tokens.items()}, state)
        want[part] = row[0]
        if index >= 0:
            expected[index] = last[0]
    np.testing.assert_allclose(output, want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(after, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_gradients_reach_slots_and_stop_at_those_that_nobody_reads(name):
    call, _, _, slots = CASES[name]
    gradient = jax.grad(lambda slots: jnp.sum(call(slots, *PACKED)[0]))(slots)
    read = [0, 3]
    assert np.all(np.any(np.asarray(gradient)[read], axis=tuple(range(1, slots.ndim))))
    assert not np.any(np.delete(np.asarray(gradient), read, axis=0))


def test_wrong_indices_are_refused_by_name():
    with pytest.raises(ValueError, match="query_start_loc"):
        CASES["gla"][0](SLOTS_KV, STARTS, INDICES[:2])
    with pytest.raises(ValueError, match="state_indices"):
        CASES["mamba 2"][0](SLOTS_PE, STARTS, INDICES.astype(jnp.float32))


def test_gradients_of_a_packed_scan_are_those_of_its_sequences():
    def packed(given):
        A, D, states, tokens = given
        rows = {name: x[None] for name, x in tokens.items()}
        y, last, _ = state_space_v1(A=A, D=D, initial_state=states, cu_seqlens=STARTS, **rows)
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(last))

    def apart(given):
        A, D, states, tokens = given
        total = 0.0
        for n in range(4):
            part = slice(int(STARTS[n]), int(STARTS[n + 1]))
            if part.start == part.stop:
                total += jnp.sum(jnp.cos(states[n]))
                continue
            rows = {name: x[None, part] for name, x in tokens.items()}
            y, last, _ = state_space_v1(A=A, D=D, initial_state=states[None, n], **rows)
            total += jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(last))
        return total

    given = (ONE_A, ONE_D, SLOTS_IE[:4], ONE)
    got, want = jax.value_and_grad(packed)(given), jax.value_and_grad(apart)(given)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4), got, want)


def test_states_in_unused_slots_reach_no_output():
    """The second request has no tokens, so its slot is another's too."""
    for name in ("gla", "mamba 2", "mamba 1"):
        call, _, _, slots = CASES[name]
        clean, after = call(slots, *PACKED)
        poisoned = slots.at[jnp.array([1, 2, 4])].set(jnp.nan)
        output, held = call(poisoned, *PACKED)
        np.testing.assert_array_equal(output, clean)
        np.testing.assert_array_equal(held, after.at[jnp.array([1, 2, 4])].set(jnp.nan))
        gradient = jax.grad(lambda slots, call=call: jnp.sum(call(slots, *PACKED)[0]))(poisoned)
        np.testing.assert_array_equal(jnp.isfinite(gradient), True)


@pytest.mark.parametrize("name", CASES)
def test_donated_slots_are_updated_in_place(name):
    call, _, _, slots = CASES[name]
    slots = jnp.tile(slots, (4000, *(1,) * (slots.ndim - 1)))
    compiled = jax.jit(call, donate_argnums=0).lower(slots, *PACKED).compile()
    memory, size, pointer = compiled.memory_analysis(), slots.nbytes, slots.unsafe_buffer_pointer()
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 8  # nor is there a copy
    assert compiled(slots, *PACKED)[1].unsafe_buffer_pointer() == pointer


def test_slots_of_an_operation_go_backwards_in_time_too():
    options = {"initial_state": SLOTS_KV, "cu_seqlens": STARTS, "return_state": True, "reverse": True}
    output, after = gla_attention(**QKV, g=GATES, state_indices=INDICES, **options)
    held = jnp.where((INDICES >= 0)[:, None, None, None], SLOTS_KV[INDICES], 0)
    want, states = gla_attention(**QKV, g=GATES, **(options | {"initial_state": held}))
    np.testing.assert_allclose(output, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(after, SLOTS_KV.at[jnp.array([3, 0])].set(states[jnp.array([0, 3])]), atol=1e-5)


def test_state_indices_need_packed_sequences_and_states():
    call = {**QKV, "g": GATES, "state_indices": INDICES}
    with pytest.raises(ValueError, match="state_indices: got a value without initial_state"):
        gla_attention(**call, cu_seqlens=STARTS)
    with pytest.raises(ValueError, match="state_indices: got a value without cu_seqlens"):
        gla_attention(**{name: x[None] for name, x in QKV.items()}, state_indices=INDICES, initial_state=SLOTS_KV)
    with pytest.raises(ValueError, match=r"initial_state: .*slots"):
        gla_attention(**call, cu_seqlens=STARTS, initial_state=SLOTS_KV[0])


@pytest.mark.parametrize("operation", [ragged_gated_delta_rule, ragged_kernel_delta_attention])
def test_tokens_of_no_request_get_gradients_of_zero_where_l2_norms_read_them(operation):
    """Tokens after all requests hold NaN and infinities: their own gradients are 0, not NaN."""
    starts, end = jnp.array([0, 5, 9]), 9
    unused = jnp.arange(T) >= end

    def total(query, key, value):
        gate = GATES[..., 0] if operation is ragged_gated_delta_rule else GATES
        slots = SLOTS_KV[:2] * 0
        output, held = operation(query, key, value, BETA, gate, slots, starts, jnp.array([1, 0]), use_qk_l2norm=True)
        return jnp.sum(jnp.square(output)) + jnp.sum(held)

    arrays = normal(T, H, K), normal(T, H, K), normal(T, H, V)
    poisoned = [x.at[end:].set(jnp.nan).at[T - 1].set(jnp.inf) for x in arrays]
    clean = jax.grad(total, argnums=(0, 1, 2))(*arrays)
    for gradient, expected in zip(jax.grad(total, argnums=(0, 1, 2))(*poisoned), clean, strict=True):
        np.testing.assert_array_equal(gradient[unused], 0)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)
