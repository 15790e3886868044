"""Messages that tell what a caller passed, and warnings of `explain`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel.modules import expert_routing, flash_attention, grouped_matmul, kda_decay, mean_pooling, state_space_v2
from ejkernel.ops import explain


def test_messages_call_arrays_traced_only_under_a_trace():
    with pytest.raises(ValueError, match=r"x: got an array float32\[8\]"):
        mean_pooling(jnp.zeros(8))
    with pytest.raises(ValueError, match=r"x: got a traced array float32\[8\]"):
        jax.jit(mean_pooling)(jnp.zeros(8))
    with pytest.raises(ValueError, match=r"x: got an array float32\[8\]"):
        explain(mean_pooling, jnp.zeros(8))


def test_messages_say_that_a_static_argument_is_traced():
    x = jnp.zeros((1, 4, 2, 8))
    with pytest.raises(ValueError, match="sliding_window: got an array"):
        flash_attention(x, x, x, sliding_window=jnp.array(3))
    with pytest.raises(ValueError, match="sliding_window: got a traced array"):
        jax.jit(lambda w: flash_attention(x, x, x, sliding_window=w))(3)


def mesh_of(name):
    return jax.sharding.Mesh(np.array(jax.devices()[:2]), (name,))


def test_out_specs_errors_name_the_output():
    x, state = jnp.ones((2, 8, 4, 16)), jnp.ones((2, 8, 4))
    arrays = (x, -jnp.ones(4), jnp.ones((2, 8, 1, 8)), jnp.ones((2, 8, 1, 8)), jnp.ones(4), state)
    specs = {"in_specs": (P("dp"), None, P("dp"), P("dp"), None, P("dp")), "out_specs": (P("dp"), P())}
    with pytest.raises(ValueError, match=r"the output 1 of state_space_v2, with axes 'b h v k', P\('dp'"):
        state_space_v2(*arrays, mesh=mesh_of("dp"), **specs)


def test_errors_for_split_experts_point_to_the_documentation():
    specs = {"in_specs": (P(), P("ep"), P()), "out_specs": P(), "mesh": mesh_of("ep")}
    with pytest.raises(
        ValueError, match=r"cannot be split .* in grouped_matmul; give each device .*grouped_matmul\.md"
    ):
        grouped_matmul(jnp.ones((4, 8)), jnp.ones((2, 8, 8)), jnp.array([2, 2]), **specs)
    with pytest.raises(ValueError, match="in expert_routing; give each device its own experts"):
        expert_routing(jnp.ones((4, 8)), 2, mesh=mesh_of("ep"), in_specs=(P(None, "ep"),), out_specs=P())


def test_kda_decay_accepts_the_parameter_shapes_of_checkpoints():
    keys = jax.random.split(jax.random.key(0), 3)
    gate, log, bias = (jax.random.normal(k, s) for k, s in zip(keys, ((2, 5, 4, 8), (4,), (4, 8)), strict=True))
    expected = -jnp.exp(log)[:, None] * jax.nn.softplus(gate + bias)
    np.testing.assert_allclose(kda_decay(gate, log, bias), expected, rtol=1e-6)
    np.testing.assert_array_equal(
        kda_decay(gate, log.reshape(1, 1, 4, 1), bias.reshape(-1)), kda_decay(gate, log, bias)
    )
    one = -jnp.exp(log) * jax.nn.softplus(gate[..., 0] + bias[:, 0])
    np.testing.assert_allclose(kda_decay(gate[..., 0], log.reshape(1, 1, 4, 1), bias[:, 0]), one, rtol=1e-6)


@pytest.mark.parametrize(
    ("gate", "log", "bias", "said"),
    [
        ((2, 5, 32), (4,), (32,), r"reshape a gate \[..., H \* K\] to \[..., 4, 8\]"),
        ((2, 5, 4, 4), (4,), (8,), r"gate: got shape \(2, 5, 4, 4\) with A_log of 4 heads and dt_bias \(8,\)"),
        ((2, 5, 4, 8), (4, 1), (4, 8), r"A_log: got shape \(4, 1\), wants \[H\], or \[1, 1, H, 1\]"),
    ],
)
def test_kda_decay_errors_explain_mismatched_shapes(gate, log, bias, said):
    with pytest.raises(ValueError, match=said):
        kda_decay(jnp.zeros(gate), jnp.zeros(log), jnp.zeros(bias))


def test_explain_warns_of_inputs_with_heads_before_tokens():
    shape = jax.ShapeDtypeStruct((2, 8, 512, 64), jnp.float32)
    said = str(explain(flash_attention, shape, shape, shape))
    assert "warning: query [2, 8, 512, 64] has 8 tokens and 512 heads, as [B, T, H, D]; swap axes 1 and 2 if" in said
    for tokens, heads in ((512, 8), (1, 32)):
        usual = jax.ShapeDtypeStruct((2, tokens, heads, 64), jnp.float32)
        assert "warning" not in str(explain(flash_attention, usual, usual, usual))
