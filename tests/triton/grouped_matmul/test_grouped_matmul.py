"""Grouped matmul in Triton: its numbers in the interpreter, and what its kernels take of a chip."""

import dataclasses
import hashlib
import importlib.resources
import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from triton_chips import CHIPS, assert_conforms, assert_fits_and_spills_nothing, on_chips

from ejkernel.families.grouped_matmul import GroupedMatmul
from ejkernel.ops import ConfigSelectorChain
from ejkernel.ops.config.selection import Request
from ejkernel.ops.config.table import decode, entry_config_part
from ejkernel.ops.device import target_device
from ejkernel.ops.plugins import registry
from ejkernel.types.pullback import Pullback
from ejkernel_triton import grouped_matmul, launch
from ejkernel_triton.grouped_matmul import config, spec
from ejkernel_triton.grouped_matmul.backward import backward
from ejkernel_triton.grouped_matmul.forward import forward

KERNELS = {"grouped_gemm_kernel", "grouped_gemm_drhs_kernel", "grouped_dbias_kernel"}
SHAPE = jax.ShapeDtypeStruct


def test_conformance():
    assert_conforms(("grouped_matmul",), "not eager and not determinism and not test_shapes")


def bytes_of(blocks=1, rows=32768, precision=None):
    """The same product of rows and matrices of 8 bits, with scales in a number of blocks."""
    groups, depth, width = 64, 2048, 1408
    return GroupedMatmul(
        lhs=SHAPE((rows, depth), jnp.float8_e4m3fn),
        rhs=SHAPE((groups, width, depth), jnp.float8_e4m3fn),
        group_sizes=SHAPE((groups,), jnp.int32),
        out_dtype=jnp.dtype(jnp.bfloat16),
        lhs_scale=SHAPE((rows, blocks), jnp.float32),
        rhs_scale=SHAPE((groups, blocks, 1, width), jnp.float32),
        transpose_rhs=True,
        precision=precision,
        left_over="zero",
    )


def record_of(rows=32768, dtype="bfloat16", stored=None, blocks=0, beside=False, precision=None):
    """The first product of 64 experts, with matrices stored in a dtype and scaled in a number of blocks."""
    groups, depth, width = 64, 2048, 1408
    return GroupedMatmul(
        lhs=SHAPE((rows, depth), dtype),
        rhs=SHAPE((groups, depth, width), stored or dtype),
        group_sizes=SHAPE((groups,), jnp.int32),
        out_dtype=jnp.dtype(jnp.float32 if precision else dtype),
        rhs_scale=SHAPE((groups, blocks, 1, width), jnp.float32) if blocks else None,
        rhs_bias=SHAPE((groups, 1, width), dtype) if beside else None,
        existing_out=SHAPE((rows, width), dtype) if beside else None,
        precision=precision,
        left_over="zero",
    )


def launches(record, device):
    """What a call and its gradients launch on a device."""
    wanted = {"lhs"} | ({"rhs"} if record.rhs_scale is None else set())
    wanted |= {"rhs_bias"} if record.rhs_bias is not None else set()

    def run(record, cotangent):
        output, _ = forward(record, config.heuristic(record, device, "forward"))
        saved = Pullback(record=record, residuals=(), output=output, cotangent=cotangent, grad_fields=frozenset(wanted))
        return output, backward(saved, config.heuristic(record, device, "backward"))

    cotangent = SHAPE((record.lhs.shape[0], record.rhs.shape[2]), record.out_dtype)
    with target_device(device), launch.collect_launches() as calls:
        jax.eval_shape(run, record, cotangent)
    return calls


RECORDS = {
    "bfloat16": record_of(),
    "bias and existing_out": record_of(beside=True),
    "float32": record_of(dtype="float32"),
    "int8": record_of(stored="int8", blocks=1),
    "int8 in blocks": record_of(stored="int8", blocks=16),
    "decoding": record_of(rows=256, beside=True),
    "some rows": record_of(rows=4096),
    "all digits": record_of(precision=lax.Precision.HIGHEST),
}


@pytest.mark.parametrize(("name", "chip"), on_chips(RECORDS))
def test_kernels_fit_the_chip_and_spill_nothing(name, chip):
    calls = launches(RECORDS[name], CHIPS[chip])
    assert {call.kernel.__name__ for call in calls} <= KERNELS
    assert_fits_and_spills_nothing(calls, chip)


BYTES = {
    "8 bits": bytes_of(),
    "8 bits, summed by the matrix unit": bytes_of(precision=lax.Precision.DEFAULT),
    "8 bits in blocks": bytes_of(16),
    "8 bits, decoding": bytes_of(rows=256),
}


@pytest.mark.parametrize(("name", "chip"), on_chips(BYTES, ["sm_90", "sm_100", "sm_120"]))
def test_products_of_8_bits_fit_the_chip_and_spill_nothing(name, chip):
    record, device = BYTES[name], CHIPS[chip]
    with target_device(device), launch.collect_launches() as calls:
        jax.eval_shape(lambda record: forward(record, config.heuristic(record, device, "forward"))[0], record)
    assert_fits_and_spills_nothing(calls[:1], chip)


def test_a_k_step_of_an_8_bit_product_has_one_scale():
    with target_device(CHIPS["sm_80"]):
        assert spec.longest_float8_step(bytes_of()) == 0
    with target_device(CHIPS["sm_90"]):
        assert [spec.longest_float8_step(bytes_of(blocks)) for blocks in (1, 16, 32, 64, 128)] == [128, 128, 64, 32, 0]
        wide = config.heuristic(bytes_of(), CHIPS["sm_90"], "forward")
        with pytest.raises(ValueError, match="block_k=128, wants a divisor of 64"):
            jax.eval_shape(lambda record: forward(record, wide)[0], bytes_of(32))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_candidates_are_distinct_and_the_heuristic_is_the_first(direction):
    record = RECORDS["bfloat16"]
    found = config.candidates(record, CHIPS["sm_90"], direction)
    assert len(set(found)) == len(found) > 4
    assert config.heuristic(record, CHIPS["sm_90"], direction) == found[0]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_only_calls_of_the_measured_kind_take_the_tuned_entry(direction):
    op, device = registry().ops["grouped_matmul"], CHIPS["sm_90"]
    (implementation,) = grouped_matmul.implementations()

    def chosen(record):
        request = Request(op=op, implementation=implementation, direction=direction, device=device, record=record)
        return ConfigSelectorChain().choose(request).trail[-1]

    assert chosen(RECORDS["bfloat16"]) == "persistent: shipped table"
    assert chosen(RECORDS["bias and existing_out"]) != "persistent: shipped table"
    assert chosen(RECORDS["decoding"]) != "persistent: shipped table"


def test_tuned_entries_are_unchanged_since_they_were_measured():
    """The digest is of the H200's table as it was measured, when GROUP_M was a field with one value, `band`."""
    file = importlib.resources.files("ejkernel_triton") / "tuned" / "NVIDIA_H200" / "grouped_matmul.json"
    types = {"forward": config.GroupedForward, "backward": config.GroupedBackward}
    lines = []
    for key, entry in decode(file.read_bytes()).items():
        direction, kind = (key.split(" | ")[n] for n in (2, 5))
        fields = dataclasses.asdict(entry_config_part(entry, types[direction], key)) | {"band": config.GROUP_M}
        lines.append(f"{direction} {kind}: {json.dumps(fields, sort_keys=True)} {entry.seconds}")
    digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
    assert digest == "797c1e44a304c7d281290379f4a551c59a8a5ca75cf6f9654e392b3f3830b6f9"


def test_an_unsupported_dtype_of_matrices_is_refused_by_name():
    (implementation,) = grouped_matmul.implementations()
    reasons = list(implementation.requires.extra(record_of(stored="uint8")))
    assert any(reason.startswith("rhs: got uint8, the kernel reads") for reason in reasons), reasons
