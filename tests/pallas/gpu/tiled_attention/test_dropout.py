"""Dropout's numbers as the Mosaic GPU kernels read them."""

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.planning import dropout
from ejkernel_pallas.gpu.tiled_attention.kernels import dropout as tile_dropout
from ejkernel_pallas.gpu.tiled_attention.spec import make_spec


def make(prob, queries=70, keys=130):
    q, k = (jnp.zeros((2, n, 4, 64), jnp.bfloat16) for n in (queries, keys))
    seed = jnp.uint32(5)
    return TiledAttention(query=q, key=k, value=k, softmax_scale=0.1, dropout_prob=prob, dropout_seed=seed)


def test_products_of_row_and_column_keys_keep_the_same_weights_as_other_backends():
    record = make(0.3)
    spec = make_spec(record)
    made = tile_dropout.dropout_key_operands(record, spec, 64, 128)
    assert {name: (x.shape, x.dtype.name) for name, x in made.items()} == {
        "q_dropout_keys": ((2, 4, 128), "uint32"),
        "k_dropout_keys": ((1, 256), "uint32"),
    }
    kept = made["q_dropout_keys"][..., :70, None] * made["k_dropout_keys"][:, None, None, :130] >= jnp.uint32(
        spec.dropout_threshold
    )
    index = jnp.arange(2)[:, None, None], jnp.arange(4)[:, None], jnp.arange(70)
    rows = dropout.row_keys(record.dropout_seed, *index)
    np.testing.assert_array_equal(kept, dropout.is_kept(rows[..., None], jnp.arange(130), 0.3))


@pytest.mark.parametrize("prob", [0.0, 2.0**-40])
def test_dropout_that_drops_nothing_has_no_key_operands(prob):
    record = make(prob)
    assert tile_dropout.dropout_key_operands(record, make_spec(record), 64, 128) == {}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dropped_weight_is_exact_in_the_dtype(dtype):
    tiny = tile_dropout.DROPPED_WEIGHT[dtype]
    assert float(np.asarray(tiny, dtype)) == tiny
    assert float(np.float32(1 / tiny)) == 1 / tiny
