"""`ejkernel.xla_utils.prepare_*` against loops over the sequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel import xla_utils

LENGTHS = ([3, 0, 5, 1], [0, 0], [7], [1, 1, 1], [0, 4, 0])


def cumulative(lengths: list[int]) -> np.ndarray:
    return np.cumsum([0, *lengths]).astype(np.int32)


def tokens(lengths: list[int]) -> list[list[int]]:
    return [[n, place] for n, length in enumerate(lengths) for place in range(length)]


def chunks(lengths: list[int], size: int) -> list[list[int]]:
    return [[n, chunk] for n, length in enumerate(lengths) for chunk in range(-(-length // size))]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_token_indices_match_a_loop(lengths):
    cu, want = cumulative(lengths), tokens(lengths)
    assert xla_utils.prepare_lens(cu).tolist() == lengths
    assert xla_utils.prepare_token_indices(cu).tolist() == want
    assert xla_utils.prepare_sequence_ids(cu).tolist() == [n for n, _ in want]
    assert xla_utils.prepare_position_ids(cu).tolist() == [place for _, place in want]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_chunk_indices_match_a_loop(lengths, size):
    cu, want = cumulative(lengths), chunks(lengths, size)
    assert xla_utils.prepare_chunk_indices(cu, size).tolist() == want
    assert xla_utils.prepare_chunk_offsets(cu, size).tolist() == cumulative([-(-n // size) for n in lengths]).tolist()


@functools.partial(jax.jit, static_argnums=(1, 2))
def traced(cu, size, total):
    return (
        xla_utils.prepare_token_indices(cu, total),
        xla_utils.prepare_sequence_ids(cu, total),
        xla_utils.prepare_position_ids(cu, total),
        xla_utils.prepare_chunk_indices(cu, size, total),
        xla_utils.prepare_chunk_offsets(cu, size),
    )


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=4, max_size=4), st.sampled_from([1, 3]))
def test_traced_lengths_give_the_same_indices_and_padding_after_them(lengths, size):
    total, want, behind = 24, tokens(lengths), [-1, 0]
    indices, ids, places, cut, offsets = traced(cumulative(lengths), size, total)
    assert indices.tolist() == want + [behind] * (total - len(want))
    assert ids.tolist() == indices[:, 0].tolist()
    assert places.tolist() == indices[:, 1].tolist()
    assert cut.tolist() == chunks(lengths, size) + [behind] * (total - len(chunks(lengths, size)))
    assert offsets[-1] == len(chunks(lengths, size))
    assert all(x.dtype == jnp.int32 for x in (indices, ids, places, cut, offsets))


def test_lengths_are_counted_from_masks():
    mask = jnp.array([[1, 1, 0], [0, 0, 0], [1, 1, 1]])
    assert xla_utils.prepare_lens_from_mask(mask).tolist() == [2, 0, 3]
    assert jax.jit(xla_utils.prepare_cu_seqlens_from_mask)(mask > 0).tolist() == [0, 2, 2, 5]
    assert xla_utils.prepare_cu_seqlens_from_mask(mask, out_dtype=jnp.uint8).dtype == jnp.uint8


def test_chunks_of_vmapped_lengths():
    cu = jnp.array([[0, 3, 4], [0, 0, 5]])
    found = jax.vmap(lambda one: xla_utils.prepare_chunk_indices(one, 2, 3))(cu)
    assert found.tolist() == [[[0, 0], [0, 1], [1, 0]], [[1, 0], [1, 1], [1, 2]]]


@pytest.mark.parametrize("name", ["prepare_sequence_ids", "prepare_position_ids", "prepare_token_indices"])
def test_a_trace_needs_the_total(name):
    with pytest.raises(ValueError, match=r"total: got None with a traced cu_seqlens, wants the number of tokens"):
        jax.jit(getattr(xla_utils, name))(jnp.array([0, 3]))


def test_wrong_totals_chunk_counts_and_lengths_are_refused():
    with pytest.raises(ValueError, match=r"num_chunks: got None with a traced cu_seqlens"):
        jax.jit(lambda cu: xla_utils.prepare_chunk_indices(cu, 2))(jnp.array([0, 3]))
    with pytest.raises(ValueError, match=r"total: got 2, wants at least 3"):
        xla_utils.prepare_sequence_ids(jnp.array([0, 3]), 2)
    with pytest.raises(ValueError, match=r"num_chunks: got 1, wants at least 2"):
        xla_utils.prepare_chunk_indices(jnp.array([0, 3]), 2, 1)
    with pytest.raises(ValueError, match=r"chunk_size: got int 0, wants an int of at least 1"):
        xla_utils.prepare_chunk_offsets(jnp.array([0, 3]), 0)
    for wrong in ([0, 3, 2], [1, 3]):
        with pytest.raises(ValueError, match=r"cu_seqlens: got .*, wants lengths that start at 0, never decrease"):
            xla_utils.prepare_lens(jnp.array(wrong))
    for shape in ((0,), (2, 2)):
        with pytest.raises(ValueError, match=r"cu_seqlens: got shape .*, wants \[N"):
            xla_utils.prepare_lens(jnp.zeros(shape, jnp.int32))
    with pytest.raises(ValueError, match=r"cu_seqlens: got dtype float32, wants an integer dtype"):
        xla_utils.prepare_lens(jnp.array([0.0, 3.0]))
    with pytest.raises(ValueError, match=r"mask: got shape \(3,\), wants \[B, T\]"):
        xla_utils.prepare_lens_from_mask(jnp.ones(3))
