"""Which implementation of a ring step a call takes: remote copies inside a kernel, or collectives.

Remote copies: one kernel a device and pass sends keys on while it works on them. Collectives: keys travel between
kernels, which serves everything.
"""

import jax

from ejkernel.families.ring_attention import RingAttention, axis_size
from ejkernel.families.tiled_attention import SoftmaxResiduals
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.interpret import interpreting
from ejkernel_pallas.tpu.mosaic.vectors import LANES
from ejkernel_pallas.tpu.ring_attention import backward as collectives_backward
from ejkernel_pallas.tpu.ring_attention import forward as collectives
from ejkernel_pallas.tpu.ring_attention import remote, remote_backward, tiles
from ejkernel_pallas.tpu.tiled_attention.spec import Blocks
from ejkernel_pallas.tpu.tiled_attention.tiles import TpuBackward, TpuForward

MAX_PAIRS = 2**15
"""Pairs of tiles of 512 by 512, or what divides a part, of all loads of a call, that a table has room for."""


def forward(record: RingAttention, params: TpuForward) -> tuple[jax.Array, SoftmaxResiduals]:
    """Attention output and residuals of one device's queries, [B, T, H, Dv] in the query's dtype."""
    way = remote if by_remote_copies(record) else collectives
    return way.forward(record, params)


def backward(pullback: Pullback, params: TpuBackward) -> dict[str, jax.Array]:
    """Gradients of the wanted fields of one device's record, each in its field's shape and dtype."""
    way = remote_backward if by_remote_copies(pullback.record) else collectives_backward
    return way.backward(pullback, params)


def by_remote_copies(record: RingAttention) -> bool:
    """Whether one kernel a device serves a record: parts of whole tiles, of which a table can list all pairs."""
    parts, lengths = axis_size(record.axis_name), (record.query.shape[1], record.key.shape[1])
    # Interpreted they are in tests alone, which ask for it.
    if parts == 1 or record.bias is not None or record.mask is not None or interpreting():
        return False
    if any(length % (2 * LANES if record.causal else LANES) for length in lengths):
        return False
    rows = (record.q_segment_ids, record.kv_segment_ids, record.q_positions, record.kv_positions)
    batch = max(1 if x is None else x.shape[0] for x in rows)
    blocks = tiles.fitted(record, Blocks(512, 512, 512, 512))
    return parts * batch * -(-lengths[0] // blocks.queries) * -(-lengths[1] // blocks.keys) <= MAX_PAIRS
