"""Lengths, starts, counts and tables that contradict each other: an error that names the argument, eager and traced."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import paged_calls
import paged_loop
import pytest
from jax.experimental import checkify
from paged_calls import DECODING, OPS, Paged

import ejkernel.modules as ej
from ejkernel.modules import operations
from ejkernel.ops import check_values, values

MIXED = paged_loop.make((7, 3), (5, 3))
DECODE = paged_loop.make((7, 3), (1, 1))
CHUNK = paged_loop.make((7,), (5,))
ARRAYS = {
    op: paged_calls.arguments(
        op, Paged(DECODE if op in DECODING else CHUNK if op == "prefill_page_attention" else MIXED)
    )
    for op in OPS
}
PLACES = {"unified_attention": (3, 5), "ragged_page_attention_v2": (2, 4)}
PLACES |= {"chunked_prefill_paged_decode": (5, 7), "ragged_page_attention_v3": (4, 6)}
OPTIONS = {"decode_attention": {"page_size": 4}, **{op: paged_calls.layout(op) for op in ("page_attention", OPS[3])}}


def changed(op, **values):
    """The arguments of a call with other values in the argument at `arg<n>`."""
    arrays = list(ARRAYS[op])
    for name, value in values.items():
        arrays[int(name[3:])] = jnp.asarray(value, jnp.int32)
    return arrays


def packed_mistakes():
    for op, (lens, starts) in PLACES.items():
        yield op, changed(op, **{f"arg{lens}": [4, 3]}), {}, r"^kv_lens: got \[4, 3\], wants at least as many tokens"
        yield (
            op,
            changed(op, **{f"arg{lens}": [7, 9]}),
            {},
            r"^kv_lens: got \[7, 9\], wants at most 8 tokens: \w+ has 2 pages of 4",
        )
        wants = r"^query_start_loc: got \[{}\], wants starts from 0 to 8, the number of query rows, that never decrease"
        for bounds in ([0, 5, 9], [0, 5, 4], [-1, 4, 8]):
            said = wants.format(", ".join(f" ?{n}" for n in bounds))
            yield op, changed(op, **{f"arg{starts}": bounds}), {}, said


MISTAKES = [
    *packed_mistakes(),
    ("ragged_page_attention_v2", changed("ragged_page_attention_v2", arg5=3), {}, "^num_seqs: got 3, wants a number"),
    (
        "ragged_page_attention_v3",
        changed("ragged_page_attention_v3", arg7=[0, 0, 3]),
        {},
        r"^distribution: got \[0, 0, 3\], wants numbers that never decrease from 0 to the 2 sequences",
    ),
    ("ragged_page_attention_v3", changed("ragged_page_attention_v3", arg7=[2, 1, 2]), {}, "^distribution: got"),
    (
        "unified_attention",
        changed("unified_attention"),
        {"shared_prefix": jnp.int32(1)},
        "^shared_prefix: got 1, wants",
    ),
    ("unified_attention", changed("unified_attention"), {"shared_prefix": jnp.int32(-1)}, "^shared_prefix: got -1"),
    ("page_attention", changed("page_attention", arg3=[7, 9]), {}, r"^kv_lens: got .* block_tables has pages for"),
    ("page_attention", changed("page_attention"), {"max_context_len": 6}, "^kv_lens: got .* max_context_len"),
    ("decode_attention", changed("decode_attention", arg4=[-1, 3]), {}, r"^kv_lens: got \[-1, +3\], wants lengths"),
    ("prefill_page_attention", changed("prefill_page_attention", arg3=[9]), {}, r"^kv_lens: got \[9\], wants a"),
    ("ragged_decode_attention", changed("ragged_decode_attention", arg4=[7, 99]), {}, r"^sequence_end: got .* to 10"),
    ("ragged_decode_attention", changed("ragged_decode_attention", arg3=[-2, 0]), {}, "^sequence_start: got"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: f"{mistake[0]} {mistake[3][1:30]}")
def test_values_that_contradict_each_other_are_refused(mistake):
    op, arrays, options, said = mistake
    call = functools.partial(getattr(ej, op), **options, **OPTIONS.get(op, {}))
    with pytest.raises(ValueError, match=said):
        call(*arrays)
    with pytest.raises(ValueError, match=said):  # the error comes at trace time where the values are known then
        jax.jit(lambda query: call(query, *arrays[1:]))(arrays[0])
    # Of a traced call only the checks are run here.
    declared = next(one for one in operations.OPS if one.name == op)
    record, _ = declared.bind(tuple(arrays), call.keywords)
    with check_values():
        error, _ = checkify.checkify(jax.jit(lambda args: values.check(declared.conditions, args)))(record)
    assert error.get().startswith(said[1:11])


LIVE = {"ragged_page_attention_v2": {"arg5": 1}, "ragged_page_attention_v3": {"arg7": [0, 0, 1]}}


@pytest.mark.parametrize("op", LIVE)
def test_sequences_that_are_not_live_may_hold_anything(op):
    lens, starts = PLACES[op]
    getattr(ej, op)(*changed(op, **{f"arg{lens}": [7, 99], f"arg{starts}": [0, 5, 900]}, **LIVE[op]))


@pytest.mark.parametrize("op", [op for op in operations.OPS if op.conditions is not None], ids=lambda op: op.name)
def test_the_cases_of_an_operation_satisfy_its_conditions(op):
    # The conformance suite calls the operation with all of its cases; here are two, of NumPy and of JAX.
    for case in op.cases[:2]:
        for condition in op.conditions(case.make(jax.random.key(0))):
            for xp in (np, jnp):
                assert condition.holds(xp, *map(xp.asarray, condition.arrays)), (case.name, condition.name)


def dense_mistakes():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 16))
    bounds, sizes = jnp.array([0, 5, 9]), jnp.array([5, 4])
    flat, matrices = q[0, :, 0], jnp.ones((2, 16, 4))
    state, twice, six = jnp.zeros((3, 2, 16, 16)), jnp.array([1, 1]), jnp.array([0, 5, 6])
    indices, inverse = jnp.array([[1, 0]]), jnp.array([[0], [1]])
    rnn = (jnp.ones((2, 3, 4)), jnp.ones((1, 8, 4)), jnp.ones((1, 1, 8, 8)))
    return {
        "flash_attention": (lambda x: ej.flash_attention(q, k, v, cum_seqlens_q=x), bounds, "cum_seqlens_q: got"),
        "scaled_dot_product_attention": (
            lambda x: ej.scaled_dot_product_attention(q, k, v, cum_seqlens_q=x),
            bounds,
            "cum_seqlens_q: got",
        ),
        "flash_attention over pages": (
            lambda x: ej.flash_attention(
                q[:, :1], k.reshape(2, 4, 2, 16), k.reshape(2, 4, 2, 16), None, None, x, None, jnp.array([[0, 1]])
            ),
            jnp.array([0, 9]),
            "cum_seqlens_k: got .* at most the 8 tokens",
        ),
        "recurrent_attention": (lambda x: ej.recurrent_attention(q, k, v, cu_seqlens=x), bounds, "cu_seqlens: got"),
        "slots": (
            lambda x: ej.recurrent_attention(q, k, v, initial_state=state, cu_seqlens=six, state_indices=x),
            twice,
            r"state_indices: got \[1,? 1\], wants different slots",
        ),
        "grouped_matmul": (lambda x: ej.grouped_matmul(flat, matrices, x), sizes, "group_sizes: got .* sum of at most"),
        "gated_grouped_matmul": (
            lambda x: ej.gated_grouped_matmul(flat, matrices, x),
            jnp.array([-1, 4]),
            "group_sizes: got .* at least 0",
        ),
        "mean_pooling": (lambda x: ej.mean_pooling(q[0, :, 0], x), bounds, "cu_seqlens: got"),
        "gather_reduce": (lambda x: ej.gather_reduce(flat[:2], indices, x), inverse, "inverse: got"),
        "rnn": (lambda x: ej.rnn(*rnn, seq_lengths=x), jnp.array([3, 4]), "seq_lengths: got"),
    }


DENSE = dense_mistakes()


@pytest.mark.parametrize("name", DENSE)
def test_contradictory_values_of_dense_operations_are_refused(name):
    call, wrong, said = DENSE[name]
    with pytest.raises(ValueError, match=f"^{said}"):
        call(wrong)
    with check_values():
        error, _ = jax.jit(checkify.checkify(call))(wrong)
    with pytest.raises(checkify.JaxRuntimeError, match=said.partition(":")[0]):
        error.throw()


def test_checks_of_traced_values_are_opt_in_and_compiled():
    bounds, (q, k, v) = jnp.array([0, 5, 9]), jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 16))
    call = jax.jit(lambda x: ej.flash_attention(q, k, v, cum_seqlens_q=x))
    assert call(bounds).shape == q.shape  # traced values are not read
    with check_values(), pytest.raises(ValueError, match="checkify"):
        call(bounds)
    with check_values():
        error, output = jax.jit(checkify.checkify(lambda x: ej.flash_attention(q, k, v, cum_seqlens_q=x)))(bounds - 0)
        assert "cum_seqlens_q: got [0 5 9], wants lengths that start at 0" in error.get()
        error, output = jax.jit(checkify.checkify(lambda x: ej.flash_attention(q, k, v, cum_seqlens_q=x)))(bounds // 2)
        assert error.get() is None
    np.testing.assert_array_equal(output, call(bounds // 2))


def test_64_bit_integers_of_numpy_that_jax_would_wrap_around_are_refused():
    q = np.ones((1, 8, 2, 16), np.float32)
    with pytest.raises(
        ValueError, match="block_tables: got NumPy's int64 from 0 to 4294967297, wants values from -2147"
    ):
        ej.unified_attention(
            q[0, :2], q, q, np.array([2, 3]), np.array([[0], [2**32 + 1]]), np.array([0, 1, 2]), platform="xla"
        )
