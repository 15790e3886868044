"""Compares the tables of packed sequences' chunks that a kernel computes, interpreted, with those of JAX."""

import types

import jax.numpy as jnp
import numpy as np

from ejkernel_triton.linear_recurrence import plan

random = np.random.default_rng(0)
for tokens, sequences, chunk in ((40, 3, 16), (63, 5, 16), (300, 20, 32), (8, 30, 16), (500, 130, 16)):
    # Empty sequences, and padding tokens at both ends.
    bounds = np.sort(random.integers(0, tokens + 1, sequences + 1)).astype(np.int32)
    constants = types.SimpleNamespace(CHUNK_SIZE=chunk, NUM_CHUNKS=tokens // chunk + min(sequences, tokens))
    expected = plan._chunk_tables_of_many_sequences(jnp.asarray(bounds), constants)
    computed = plan.ChunkTables(*plan._chunk_tables_in_one_launch(jnp.asarray(bounds)[None], sequences, constants))
    chunks = int(expected.chunk_offsets[0, -1])
    for name in ("padded_cu_seqlens", "chunk_offsets", "sequences_by_length"):
        np.testing.assert_array_equal(getattr(computed, name), getattr(expected, name), err_msg=name)
    for name in ("chunk_starts", "sequence_ends"):
        np.testing.assert_array_equal(
            getattr(computed, name)[:, :chunks], getattr(expected, name)[:, :chunks], err_msg=name
        )
    # Chunks after the last one have no token.
    np.testing.assert_array_equal(computed.chunk_starts[:, chunks:], computed.sequence_ends[:, chunks:])
