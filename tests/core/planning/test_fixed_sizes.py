"""Records of shapes whose sizes do not depend on the batch."""

import jax.numpy as jnp
import numpy as np

from ejkernel.families.tiled_attention import FAMILY, TiledAttention
from ejkernel.planning.fixed_sizes import with_fixed_sizes


def test_named_axes_get_their_size_and_axes_that_broadcast_keep_one():
    x = np.zeros((1, 7, 4, 16), jnp.bfloat16)
    bias = np.zeros((1, 4, 1, 7), np.float32)
    record = TiledAttention(query=x, key=x[:, :, :2], value=x[:, :, :2], bias=bias, softmax_scale=0.25)
    fixed = with_fixed_sizes(record, FAMILY.axes_of(record), {"b": 3, "t": 32, "s": 64})
    assert (fixed.query.shape, fixed.key.shape, fixed.bias.shape) == ((3, 32, 4, 16), (3, 64, 2, 16), (1, 4, 1, 64))
    assert (fixed.query.dtype, fixed.softmax_scale) == (jnp.bfloat16, 0.25)
