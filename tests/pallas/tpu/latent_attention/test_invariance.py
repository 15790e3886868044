"""Rows of dense latent caches in a `batch_invariant` block: they keep their bits, and faults are found."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_invariance import assert_finds_products_that_follow
from tpu_paged_records import QUICKLY, lowered
from tpu_races import found
from tpu_records import close, interpreted, simulated

from ejkernel import explain
from ejkernel.families import tiled_attention
from ejkernel.modules import mla_decode
from ejkernel.modules.operations.cases import mla_decode as cases
from ejkernel.modules.operations.cases.mla_decode import DecodeSizes
from ejkernel.ops import batch_invariant
from ejkernel.ops.device import DeviceInfo, current_device, target_device
from ejkernel_pallas.tpu.latent_attention import config
from ejkernel_pallas.tpu.latent_attention.forward import forward

OPERATION = "mla_decode"
SIZES = DecodeSizes(s=500, h=4, g=2, lengths=(300, 0, 500))
DEVICES = [DeviceInfo(platform="tpu", vendor="google", kind=kind) for kind in ("TPU v5 lite", "TPU v6 lite")]
SIZES_THAT_CHANGE = {"batch": lambda record: record.query.shape[0], "padding": lambda record: record.key.shape[1]}
"""What the rule of a claim must not read, by the name of the claim."""


def output(record, **fields):
    """Output and lse in a block, with other fields of the configuration."""
    tiles = dataclasses.replace(config.batch_invariant(record, current_device(), "forward"), **fields)
    with interpreted():
        result, residuals = jax.jit(lambda record: forward(record, tiles), compiler_options=QUICKLY)(record)
    return [np.asarray(result), np.asarray(residuals.lse)]


@pytest.mark.parametrize("name", SIZES_THAT_CHANGE)
def test_the_suite_finds_products_that_follow_the_call(name, monkeypatch):
    assert_finds_products_that_follow(
        SIZES_THAT_CHANGE[name],
        name,
        "mosaic_tpu_latent",
        (OPERATION, cases.make_arrays, SIZES),
        lambda record, keys: output(record, product_keys=keys),
        monkeypatch,
    )


LAYOUTS = {
    "two caches": DecodeSizes(h=4, g=2, r=128, dtype=jnp.bfloat16),
    "one cache": DecodeSizes(h=4, g=2, has_joint_cache=True),
    "one cache with tokens along lanes": DecodeSizes(h=20, g=2, has_joint_cache=True, dtype=jnp.bfloat16),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_row_has_the_same_bits_in_longer_caches(name):
    """Caches of 640, 1152 and 2600 tokens have pages of 128, 128 and 512 slots, and up to two blocks."""
    lengths = (600, 0, 3)
    sizes = dataclasses.replace(LAYOUTS[name], s=640, lengths=lengths)
    record = lowered(OPERATION, cases.make_arrays, sizes)
    shortest = output(record)
    for x, want in zip(shortest, reference(record), strict=True):
        np.testing.assert_allclose(x.astype("float32"), want, atol=3e-2)
    for more in (512, 1920):
        longer = with_longer_caches(record, more)
        assert all((x == y).all() for x, y in zip(output(longer), shortest, strict=True))
        first = jax.tree.map(lambda x: x[:1] if isinstance(x, jax.Array) and x.shape[0] == 3 else x, longer)
        assert all((x == y[:1]).all() for x, y in zip(output(first), shortest, strict=True))


def reference(record):
    result, residuals = tiled_attention.reference(record)
    return [np.asarray(x, "float32") for x in (result, residuals.lse)]


def with_longer_caches(record, more):
    caches = {
        name: jnp.pad(getattr(record, name), ((0, 0), (0, more), (0, 0), (0, 0)), constant_values=2)
        for name in ("key", "value")
    }
    ids = jnp.pad(record.kv_segment_ids, ((0, 0), (0, more)), constant_values=-1)
    return dataclasses.replace(record, kv_segment_ids=ids, **caches)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.kind)
def test_one_configuration_serves_all_batches(device):
    shapes = [DecodeSizes(b=b, s=s, r=512, rope=64, lengths=(1,) * b) for b in (1, 40) for s in (100, 9000)]
    records = [jax.eval_shape(lambda z=z: lowered(OPERATION, cases.make_arrays, z)) for z in shapes]
    with target_device(device):
        assert len({config.batch_invariant(x, device, "forward") for x in records}) == 1


def test_calls_in_a_block_decode_in_the_kernel():
    """Rows have one query and one sequence; kernels of the whole family without a claim for segment ids are refused."""
    arguments = cases.make_arrays(jax.random.key(0), SIZES)
    with target_device(DEVICES[0]), batch_invariant():
        forward = explain(mla_decode, **arguments).forward
    assert forward.implementation is not None
    assert forward.implementation.name == "mosaic_tpu_latent"
    reasons = {verdict.implementation.name: verdict.reasons for verdict in forward.verdicts}
    refused = "batch_invariant: its rows may depend on packing"
    assert refused in reasons["mosaic_tpu"]


def test_a_block_of_two_steps_decodes_without_races():
    record = lowered(OPERATION, cases.make_arrays, dataclasses.replace(SIZES, s=700, lengths=(700, 0, 40)))
    tiles = dataclasses.replace(config.batch_invariant(record, DEVICES[0], "forward"), block_kv=1024)
    with simulated():
        result, residuals = jax.block_until_ready(jax.jit(lambda x: forward(x, tiles))(record))
    assert not found()
    expected, kept = tiled_attention.reference(record)
    close(result, expected, record.query.dtype)
    close(residuals.lse, kept.lse, record.query.dtype)
