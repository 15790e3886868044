"""Where the chunks of packed sequences lie: one kernel, in Triton's interpreter, against JAX."""

import types

import jax.numpy as jnp
import numpy as np

from ejkernel_triton.linear_recurrence import plan

random = np.random.default_rng(0)
for tokens, sequences, chunk in ((40, 3, 16), (63, 5, 16), (300, 20, 32), (8, 30, 16), (500, 130, 16)):
    # Empty sequences, and tokens of none at both ends.
    bounds = np.sort(random.integers(0, tokens + 1, sequences + 1)).astype(np.int32)
    constants = types.SimpleNamespace(CHUNK=chunk, CHUNKS=tokens // chunk + min(sequences, tokens))
    wanted = plan._index_of_many_sequences(jnp.asarray(bounds), constants)
    made = plan.ChunkIndex(*plan._index_in_one_launch(jnp.asarray(bounds)[None], sequences, constants))
    chunks = int(wanted.first_chunks[0, -1])
    for name in ("bounds", "first_chunks", "order"):
        np.testing.assert_array_equal(getattr(made, name), getattr(wanted, name), err_msg=name)
    for name in ("starts", "ends"):
        np.testing.assert_array_equal(getattr(made, name)[:, :chunks], getattr(wanted, name)[:, :chunks], err_msg=name)
    # Chunks behind the last have no token.
    np.testing.assert_array_equal(made.starts[:, chunks:], made.ends[:, chunks:])
