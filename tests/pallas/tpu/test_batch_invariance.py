"""Rules of `batch_invariant` blocks do not read the sizes of one batch, and rows keep their bits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_records import interpreted
from tpu_records import record as tiled_record

from ejkernel.families.grouped_matmul import GroupedMatmul
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.ops.plugins import registry
from ejkernel.planning.fixed_sizes import with_fixed_sizes
from ejkernel_conformance.subjects import abstract_record
from ejkernel_pallas.tpu.grouped_matmul import config as grouped_config
from ejkernel_pallas.tpu.grouped_matmul.forward import forward as grouped_forward
from ejkernel_pallas.tpu.quantized_matmul.spec import make_spec as make_quantized_spec
from ejkernel_pallas.tpu.tiled_attention import config as tiled_config
from ejkernel_pallas.tpu.tiled_attention.forward import forward as tiled_forward

DEVICES = [DeviceInfo(platform="tpu", vendor="google", kind=kind) for kind in ("TPU v5 lite", "TPU v6 lite")]
SIZES_OF_A_BATCH = ({"b": 1, "t": 1, "s": 300, "m": 1}, {"b": 40, "t": 9000, "s": 9000, "m": 9000})
CLAIMS = {
    implementation.family: (op_name, implementation)
    for op_name, listed in registry().implementations.items()
    for implementation in listed
    # No bit of the indexer depends on its tiles, which follow the call.
    if implementation.name == "mosaic_tpu" and implementation.invariant_to and op_name != "lightning_indexer"
}
# What a sum depends on, of kernels whose other fields follow the batch.
FIELDS = {"paged_attention": ("product_rows", "product_keys")}


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.kind)
@pytest.mark.parametrize("family", CLAIMS)
def test_one_configuration_serves_all_batches(family, device):
    op_name, implementation = CLAIMS[family]
    op = registry().op(op_name)
    records = [abstract_record(op, case) for case in op.cases]
    record = next(x for x in records if not any(implementation.invariance_limits(x)))
    batches = [with_fixed_sizes(record, op.family.axes_of(record), sizes) for sizes in SIZES_OF_A_BATCH]
    with target_device(device):
        tiles = [implementation.config.batch_invariant(x, device, "forward") for x in batches]
    names = FIELDS.get(family, [field.name for field in dataclasses.fields(tiles[0])])
    assert len({tuple(getattr(x, name) for name in names) for x in tiles}) == 1


def test_rows_keep_their_bits_in_tiles_that_groups_share():
    """A group fills two tiles in the first call; two groups of the same matrix share a tile in the second."""
    random = np.random.default_rng(2)
    lhs = jnp.asarray(random.normal(size=(256, 160)), jnp.float32)
    rhs = jnp.tile(jnp.asarray(random.normal(size=(1, 160, 128)), jnp.float32), (2, 1, 1))

    def output(rows, *sizes):
        arrays = {"lhs": rows, "rhs": rhs, "group_sizes": jnp.asarray(sizes, jnp.int32)}
        record = GroupedMatmul(**arrays, out_dtype=jnp.float32, left_over="zero")
        tiles = grouped_config.batch_invariant(record, DEVICES[0], "forward")
        with interpreted():
            return np.asarray(grouped_forward(record, tiles)[0])

    whole = output(lhs, 256, 0)
    assert (output(lhs, 100, 156) == whole).all()
    assert (output(lhs[77:78], 0, 1) == whole[77:78]).all()


def test_attention_keeps_its_bits_with_more_keys():
    """Keys after the last that is attended do not change the products of the others."""
    longer = tiled_record((1, 2, 1100, 1, 1, 32, 32), "bfloat16", causal=True, q_positions=jnp.array([[600, 699]]))
    shorter = dataclasses.replace(longer, key=longer.key[:, :700], value=longer.value[:, :700])

    def output(record):
        with interpreted():
            return np.asarray(tiled_forward(record, tiled_config.batch_invariant(record, DEVICES[0], "forward"))[0])

    assert (output(longer) == output(shorter)).all()


def test_few_quantized_rows_are_not_dequantized_in_pairs():
    op_name, implementation = CLAIMS["quantized_matmul"]
    op, device = registry().op(op_name), DEVICES[1]
    records = [abstract_record(op, case) for case in op.cases]
    record = next(x for x in records if x.format.integers and x.format.bits == 4)
    record = dataclasses.replace(record, x=jax.ShapeDtypeStruct((5, record.x.shape[1]), jnp.bfloat16))
    rules = implementation.config.heuristic, implementation.config.batch_invariant
    with target_device(device):
        specs = [make_quantized_spec(record, rule(record, device, "forward")) for rule in rules]
    assert [spec.unpacks_pairs for spec in specs] == [True, False]
