"""What the recurrences promise beside their formulas, and defects that they must not have (T-n)."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformed
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

import ejkernel
from ejkernel.modules import (
    GatedDeltaRuleConfig,
    KernelDeltaAttentionConfig,
    LightningAttention,
    RaggedGatedDeltaRuleConfig,
    RecurrentAttention,
    RecurrentAttentionConfig,
    gated_delta_rule,
    gated_linear_attention,
    gdr_attention,
    gla_attention,
    kda_attention,
    kda_decay,
    kernel_delta_attention,
    lightning_attention,
    lightning_attn,
    ragged_gated_delta_rule,
    recurrent,
    recurrent_attention,
    recurrent_gla,
    state_space_v2,
)

B, T, H, G, K, V = 2, 12, 4, 2, 5, 3
SHORT = RecurrentAttentionConfig(block_q=4)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


QUERY, KEY, VALUE = normal(0, B, T, H, K), normal(1, B, T, G, K), normal(2, B, T, G, V)
GATE = -jnp.abs(normal(3, B, T, H))
BETA = jax.nn.sigmoid(normal(4, B, T, H))
STATE = normal(5, B, H, K, V)
close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)


def test_aliases_are_the_same_functions():
    assert gla_attention is gated_linear_attention
    assert kda_attention is kernel_delta_attention
    assert gdr_attention is gated_delta_rule


KERNEL_LEVEL = {
    "recurrent": (recurrent, recurrent_attention, (GATE,), {}),
    "recurrent_gla": (recurrent_gla, gated_linear_attention, (GATE,), {"reverse": True}),
    "lightning_attn": (lightning_attn, lightning_attention, (STATE,), {"layer_idx": 1, "num_layers": 2}),
}


@pytest.mark.parametrize("name", KERNEL_LEVEL)
def test_kernel_level_names_always_return_the_states(name):
    function, operation, extra, options = KERNEL_LEVEL[name]
    given = (QUERY, KEY, VALUE, *extra)
    got, want = function(*given, **options), operation(*given, **options, return_state=True)
    assert isinstance(got, tuple)
    for one, other in zip(got, want, strict=True):
        close(one, other)
    assert function.__name__ == name
    parameters = set(inspect.signature(operation).parameters) - {"return_state"}
    assert set(inspect.signature(function).parameters) == parameters
    assert str(ejkernel.explain(function, *given, **options)) == str(ejkernel.explain(operation, *given, **options))


def test_t26_a_state_may_stand_where_segment_ids_do():
    want = gated_delta_rule(QUERY, KEY, VALUE, BETA, GATE, initial_state=STATE, return_state=True)
    got = gated_delta_rule(QUERY, KEY, VALUE, BETA, GATE, STATE, return_state=True)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
    one_token = [x[:, :1] for x in (QUERY, KEY, VALUE, BETA, GATE)]
    close(gated_delta_rule(*one_token, STATE), gated_delta_rule(*one_token, initial_state=STATE))
    with pytest.raises(ValueError, match=r"seg_ids: got .* with initial_state given"):
        gated_delta_rule(QUERY, KEY, VALUE, BETA, GATE, STATE, STATE)
    rows = PartitionSpec("dp")
    mesh = Mesh(np.array(jax.devices()[:B]), ("dp",))
    specs = {"mesh": mesh, "in_specs": (rows,) * 6, "out_specs": (rows, rows)}
    split = gated_delta_rule(QUERY, KEY, VALUE, BETA, GATE, STATE, return_state=True, **specs)
    for one, other in zip(split, want, strict=True):
        close(one, other)


def test_classes_run_what_the_functions_run():
    want = recurrent_attention(QUERY, KEY, VALUE, GATE)
    close(RecurrentAttention().run(QUERY, KEY, VALUE, GATE), want)
    layer = {"layer_idx": 1, "num_layers": 2}
    close(LightningAttention().run(QUERY, KEY, VALUE, **layer), lightning_attention(QUERY, KEY, VALUE, **layer))


@pytest.mark.parametrize("size", [4, 16])
def test_t1_the_callers_chunk_size_is_what_runs(size):
    arrays = QUERY[0, :, :, :], KEY[0], VALUE[0], BETA[0], GATE[0], STATE, jnp.array([0, 3, 12]), jnp.array([1, 0])
    for how in ({"chunk_size": size}, {"cfg": RaggedGatedDeltaRuleConfig(chunk_size=size)}):
        run = functools.partial(ragged_gated_delta_rule, **how)
        decision = ejkernel.explain(ragged_gated_delta_rule, *arrays, **how)
        assert decision.forward.config.chunk_size == decision.backward.config.chunk_size == size
        length = min(size, 8)  # of twelve tokens
        assert f"f32[{H},{length},{length}]" in str(jax.make_jaxpr(run)(*arrays))
        assert f"f32[{H},{2 * length},{2 * length}]" not in str(jax.make_jaxpr(run)(*arrays))


def test_t1_an_argument_wins_over_the_configuration_and_keeps_the_rest_of_it():
    cfg = KernelDeltaAttentionConfig(platform="xla", chunk_size=8)
    call = functools.partial(ejkernel.explain, kernel_delta_attention, QUERY, KEY, VALUE, BETA, GATE, cfg=cfg)
    assert call().forward.config.chunk_size == 8
    assert (call(chunk_size=2).forward.config.chunk_size, call(chunk_size=2).forward.platform) == (2, "xla")
    assert call(use_chunked=False).forward.config.chunk_size == 1


@pytest.mark.parametrize("length", [1, 3, 4, 64, 100])
def test_chunk_length_never_changes_the_answer(length):
    want = recurrent_attention(QUERY, KEY, VALUE, GATE)
    close(recurrent_attention(QUERY, KEY, VALUE, GATE, cfg=RecurrentAttentionConfig(block_q=length)), want)
    want = gated_delta_rule(QUERY, KEY, VALUE, BETA, GATE, use_chunked=False)
    close(gated_delta_rule(QUERY, KEY, VALUE, BETA, GATE, cfg=GatedDeltaRuleConfig(chunk_size=length)), want)


def test_t11_the_gradient_of_g_gamma_is_that_of_the_gates_it_stands_for():
    gamma = -jnp.abs(normal(6, H))

    def loss(gamma, gate):
        return jnp.sum(recurrent_attention(QUERY, KEY, VALUE, gate, gamma, cfg=SHORT) ** 2)

    of_gamma, of_gate = jax.grad(loss, (0, 1))(gamma, GATE)
    close(of_gamma, of_gate.sum(axis=(0, 1)), rtol=1e-4)
    assert jnp.all(jnp.abs(of_gamma) > 1e-3)
    close(jax.grad(loss)(gamma[None], GATE)[0], of_gamma)


def test_t23_a_gate_of_a_head_is_the_gate_of_all_its_channels():
    wide = jnp.broadcast_to(GATE[..., None], (B, T, H, K))
    for function in (recurrent_attention, gated_linear_attention):
        close(function(QUERY, KEY, VALUE, GATE), function(QUERY, KEY, VALUE, wide))
    close(kda_attention(QUERY, KEY, VALUE, BETA, GATE), kda_attention(QUERY, KEY, VALUE, BETA, wide))
    close(recurrent_attention(QUERY, KEY, VALUE, gk=wide), recurrent_attention(QUERY, KEY, VALUE, GATE))


def test_t23_differentiation_uses_the_scale_of_the_call():
    def total(query):
        return jnp.sum(recurrent_attention(query, KEY, VALUE, GATE))

    close(jax.value_and_grad(total)(QUERY)[0], total(QUERY))
    explicit = recurrent_attention(QUERY, KEY, VALUE, GATE, softmax_scale=K**-0.5)
    close(recurrent_attention(QUERY, KEY, VALUE, GATE), explicit)


def test_t23_fewer_key_and_value_heads_equal_repeated_heads():
    def repeated(x):
        return jnp.repeat(x, H // G, axis=2)

    close(
        recurrent_attention(QUERY, KEY, VALUE, GATE),
        recurrent_attention(QUERY, repeated(KEY), repeated(VALUE), GATE),
    )


LENGTHS = [0, 5, 5, 9, 12]


@pytest.mark.parametrize("reverse", [False, True])
def test_packed_sequences_are_separate_ones_also_with_traced_lengths(reverse):
    query, key, value, gate = QUERY[:1], KEY[:1], VALUE[:1], GATE[:1]
    states = normal(7, 4, H, K, V)

    @jax.jit
    def packed(lengths, gamma):
        options = {"reverse": reverse, "return_state": True, "cfg": SHORT}
        return recurrent_attention(query, key, value, gate, gamma, None, None, states, lengths, **options)

    gamma = -jnp.abs(normal(8, H))
    output, final = packed(jnp.array(LENGTHS), gamma)
    for n, (first, end) in enumerate(itertools.pairwise(LENGTHS)):
        if first == end:
            close(final[n], states[n])
            continue
        part = (x[:, first:end] for x in (query, key, value, gate))
        options = {"initial_state": states[n : n + 1], "reverse": reverse, "return_state": True}
        own, state = recurrent_attention(*part, gamma, **options)
        close(output[:, first:end], own)
        close(final[n], state[0])


def test_packed_tokens_may_come_without_a_row_axis():
    lengths = jnp.array(LENGTHS)
    rows = gla_attention(QUERY[:1], KEY[:1], VALUE[:1], GATE[:1], cu_seqlens=lengths)
    close(gla_attention(QUERY[0], KEY[0], VALUE[0], GATE[0], cu_seqlens=lengths), rows[0])


def test_a_sequence_can_be_continued_token_by_token():
    for function, extra in ((recurrent_attention, (GATE,)), (gated_delta_rule, (BETA, GATE))):
        arrays = QUERY, KEY, VALUE, *extra
        want, final = function(*arrays, return_state=True)
        read, state = function(*(x[:, :9] for x in arrays), return_state=True)
        parts = [read]
        for t in range(9, T):
            one = (x[:, t : t + 1] for x in arrays)
            read, state = function(*one, initial_state=state, return_state=True)
            parts.append(read)
        close(jnp.concatenate(parts, axis=1), want)
        close(state, final)


@pytest.mark.parametrize("strength", [1e2, 1e4, np.inf])
def test_gates_of_any_strength_are_exact(strength):
    """A few tokens forget (nearly) everything; what they forget weighs nothing, and nothing becomes NaN."""
    hard = jnp.zeros((B, T, H, K)).at[:, jnp.array([2, 3, 7])].set(-strength)
    gate = jnp.where(hard < 0, hard, jnp.broadcast_to(GATE[..., None], hard.shape))

    def run(gate, chunk):
        return kda_attention(QUERY, KEY, VALUE, BETA, gate, chunk_size=chunk)

    close(run(gate, 16), run(gate, 1))
    got, want = (jax.grad(lambda gate, n=n: jnp.sum(run(gate, n) ** 2))(gate) for n in (16, 1))
    assert bool(jnp.isfinite(got).all())
    close(got, want)


@pytest.mark.parametrize("op", [gated_delta_rule, kernel_delta_attention])
def test_no_rows_give_no_rows_and_no_gradients(op):
    arrays = [x[:0] for x in (QUERY, KEY, VALUE, BETA, GATE)]
    read, state = op(*arrays, return_state=True)
    assert (read.shape, state.shape) == ((0, T, H, V), (0, H, K, V))
    gradients = jax.grad(lambda *a: jnp.sum(op(*a)), tuple(range(5)))(*arrays)
    assert [x.shape for x in gradients] == [x.shape for x in arrays]


def test_a_state_space_call_without_rows_returns_no_rows():
    x, a, b, c, d, dt = VALUE[:0], -jnp.ones(G), QUERY[:0, :, :1], KEY[:0, :, :1], jnp.ones(G), GATE[:0, :, :G]
    y, state, _ = state_space_v2(x, a, b, c, d, dt)
    assert (y.shape, state.shape) == ((0, T, G * V), (0, G, V, K))
    assert not jax.grad(lambda a: jnp.sum(state_space_v2(x, a, b, c, d, dt)[0]))(a).any()


def test_t26_an_empty_request_leaves_its_slot_and_all_others_alone():
    slots = normal(9, 5, H, K, V)
    arrays = QUERY[0], KEY[0], VALUE[0], BETA[0], GATE[0]
    starts, indices = jnp.array([0, 5, 5, 9, 9]), jnp.array([3, 0, 1, 3])  # the last one is padding that repeats a slot
    read, new = jax.jit(ragged_gated_delta_rule)(*arrays, slots, starts, indices)
    np.testing.assert_array_equal(new[jnp.array([0, 2, 4])], slots[jnp.array([0, 2, 4])])
    for first, end, slot in ((0, 5, 3), (5, 9, 1)):
        part = (x[None, first:end] for x in arrays)
        own, state = gated_delta_rule(*part, initial_state=slots[slot][None], return_state=True)
        close(read[first:end], own[0])
        close(new[slot], state[0])
    assert not read[9:].any()


def test_t26_float32_is_computed_as_float32():
    slots, big = jnp.zeros((1, H, K, V)), 1 + 1e-4 * VALUE[0]
    arrays = QUERY[0], KEY[0], big, BETA[0], GATE[0], slots, jnp.array([0, T]), jnp.array([0])
    want, _ = jax.jit(ragged_gated_delta_rule)(*arrays)
    single = gated_delta_rule(*(x[None] for x in arrays[:5]))
    close(want, single[0], rtol=1e-6, atol=1e-6)


def test_t29_the_output_has_the_dtype_of_the_query_and_states_are_float32():
    low = [x.astype(jnp.bfloat16) for x in (QUERY, KEY, VALUE)]
    for run in (
        functools.partial(kernel_delta_attention, *low, BETA, GATE),
        functools.partial(recurrent_attention, *low, GATE),
        functools.partial(lightning_attention, *low, layer_idx=0, num_layers=2),
    ):
        output, state = jax.eval_shape(functools.partial(run, return_state=True))
        assert (output.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)


def test_lightning_slopes_follow_from_layer_and_head():
    last = lightning_attention(QUERY, KEY, VALUE, layer_idx=6, num_layers=6)
    close(last, recurrent_attention(QUERY, KEY, VALUE))
    gamma = -(8 / H) * (1 - 2 / 6) * jnp.arange(H)
    middle = lightning_attention(QUERY, KEY, VALUE, layer_idx=2, num_layers=6)
    close(middle, recurrent_attention(QUERY, KEY, VALUE, g_gamma=gamma))


def test_segments_reset_the_state_and_padding_is_not_there():
    ids = jnp.array([[-1, 0, 0, 3, 3, 3, -1, 3, 0, 0, -1, -1], [1] * T])
    arrays = QUERY, KEY, VALUE, BETA, GATE
    output, state = gated_delta_rule(*arrays, ids, STATE, return_state=True)
    for kept, start in (([1, 2], STATE[:1]), ([3, 4, 5, 7], None), ([8, 9], None)):
        part = (x[:1, jnp.array(kept)] for x in arrays)
        own, final = gated_delta_rule(*part, initial_state=start, return_state=True)
        close(output[0, jnp.array(kept)], own[0])
    close(state[0], final[0])
    close(output[1], gated_delta_rule(*arrays, None, STATE)[1])
    assert not output[0, jnp.array([0, 6, 10, 11])].any()


def test_kda_decay_is_its_formula():
    gate, log, bias = normal(10, B, T, H, K), normal(11, H), normal(12, H, K)
    got = kda_decay(gate, log, bias)
    close(got, -jnp.exp(log)[:, None] * jnp.log1p(jnp.exp(gate + bias)))
    close(kda_decay(gate[..., 0], log, bias[:, 0]), got[..., 0])


def test_state_space_returns_the_convolution_state_as_it_is():
    x, b, c = normal(0, B, T, H, V), normal(1, B, T, G, K), normal(2, B, T, G, K)
    conv = normal(3, B, H * V, 4)
    made = state_space_v2(x, -jnp.ones(H), b, c, jnp.ones(H), BETA, conv_state=conv)
    np.testing.assert_array_equal(made[2], conv)
    assert state_space_v2(x, -jnp.ones(H), b, c, jnp.ones(H), BETA)[2] is None


WRONG = {
    "rank": (lambda: recurrent_attention(QUERY[0], KEY, VALUE), "query: got shape .* wants \\[B, T, H, K\\]"),
    "heads": (lambda: recurrent_attention(QUERY[:, :, :3], KEY, VALUE), "key: .* wants a divisor of query's 3"),
    "dtype": (lambda: recurrent_attention(QUERY, KEY.astype(jnp.float16), VALUE), "key: got dtype float16"),
    "gate": (lambda: recurrent_attention(QUERY, KEY, VALUE, GATE[:, :4]), "g: got shape .* \\[B=2, T=12, H=4\\], or"),
    "gamma": (lambda: recurrent_attention(QUERY, KEY, VALUE, None, jnp.zeros(3)), "g_gamma: .* wants \\[H=4\\]"),
    "value gate": (lambda: recurrent_attention(QUERY, KEY, VALUE, gv=GATE), "gv: got shape .* V=3\\]"),
    "state": (lambda: recurrent_attention(QUERY, KEY, VALUE, initial_state=STATE[:1]), "initial_state: .* \\[B=2"),
    "rows": (lambda: gla_attention(QUERY, KEY, VALUE, cu_seqlens=jnp.array([0, 3])), "cu_seqlens: .* one row"),
    "lengths": (
        lambda: gla_attention(QUERY[:1], KEY[:1], VALUE[:1], cu_seqlens=jnp.array([0, 30])),
        "cu_seqlens: got .* end within 12",
    ),
    "no sequence": (
        lambda: gla_attention(QUERY[:1], KEY[:1], VALUE[:1], cu_seqlens=jnp.array([0])),
        "cu_seqlens: .* N of at least 1",
    ),
    "layer": (lambda: lightning_attention(QUERY, KEY, VALUE, layer_idx=-1, num_layers=2), "layer_idx: got int -1"),
    "beta": (lambda: gated_delta_rule(QUERY, KEY, VALUE, None), "beta: got None, wants \\[B, T, H\\]"),
    "chunk": (lambda: kda_attention(QUERY, KEY, VALUE, BETA, chunk_size=0), "chunk_size: got int 0"),
    "slots": (
        lambda: ragged_gated_delta_rule(
            QUERY[0], KEY[0], VALUE[0], BETA[0], None, STATE, jnp.array([0, 3]), jnp.array([0, 1])
        ),
        "query_start_loc: got shape \\(2,\\), wants \\[N\\+1=3\\]",
    ),
    "groups": (
        lambda: state_space_v2(QUERY, jnp.ones(H), KEY, KEY, jnp.ones(H), BETA, n_groups=1),
        "n_groups: got 1, wants the 2 groups of B",
    ),
    "norm without gate": (
        lambda: state_space_v2(QUERY, jnp.ones(H), KEY, KEY, jnp.ones(H), BETA, use_gated_rmsnorm=True),
        "gate: got None with use_gated_rmsnorm",
    ),
    "activation without gate": (
        lambda: state_space_v2(QUERY, jnp.ones(H), KEY, KEY, jnp.ones(H), BETA, act_fn=jnp.tanh),
        "act_fn: got .* without gate, wants both or None",
    ),
    "block": (lambda: RecurrentAttentionConfig(block_q=0), "block_q: got 0, wants at least 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_refused_by_the_name_of_the_argument(name):
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call()


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(
    cuts=st.lists(st.integers(0, T), max_size=4).map(sorted),
    chunk=st.sampled_from([2, 4, 8]),
    channels=st.booleans(),
)
def test_packed_sequences_match_a_row_with_resets(cuts, chunk, channels):
    """Packed sequences without states are one row whose first tokens forget; two quite different ways to compute it."""
    lengths = jnp.array([0, *(cuts + [T] * (5 - len(cuts)))])
    query, key, value = QUERY[:1], KEY[:1], VALUE[:1]
    gate = -jnp.abs(normal(13, 1, T, H, K)) if channels else GATE[:1]
    cfg = RecurrentAttentionConfig(block_q=chunk)
    packed = recurrent_attention(query, key, value, gate, cu_seqlens=lengths, cfg=cfg)
    first = jnp.zeros(T, bool).at[lengths].set(True, mode="drop")
    forgetting = jnp.where(first.reshape(1, T, *(1,) * (gate.ndim - 2)), -jnp.inf, gate)
    close(packed, recurrent_attention(query, key, value, forgetting, cfg=cfg))


def test_every_optional_array_can_be_given_by_name():
    for function in (recurrent_attention, gla_attention, lightning_attention, kda_attention, gated_delta_rule):
        parameters = inspect.signature(function).parameters
        assert parameters["initial_state"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def test_memory_of_the_gradient_is_linear():
    def call(query, key, value, beta, decay):
        return kernel_delta_attention(query, key, value, beta, decay, chunk_size=16)

    def bytes_at(length):
        shapes = [(1, length, 2, 16)] * 3 + [(1, length, 2), (1, length, 2, 16)]
        arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        return transformed.temporary_bytes(call, arrays, range(5)), sum(4 * np.prod(shape) for shape in shapes)

    (small, _), (large, inputs) = bytes_at(2048), bytes_at(4096)
    assert large <= 2.1 * small
    assert large <= 8 * inputs  # all states together would be as large as fifteen times the inputs
