"""The instructions of a product: each reads its own 16 columns, and the first alone adds to nothing."""

import re

import numpy as np
import pytest

from ejkernel_pallas.gpu.hopper import wgmma

ROWS, PART = 8, 64
BYTES = 2


def numbers(pattern, code):
    return [int(x) for x in re.findall(pattern, code)]


@pytest.mark.parametrize("keys", [64, 128, 192])
@pytest.mark.parametrize("size", [64, 128, 192, 256])
def test_product_instructions_read_consecutive_columns(size, keys):
    code = wgmma._product_ptx(keys, [size], "bf16", keys // 2, zero_accumulator=True)
    # Shared memory has eight rows after the last eight, and of these the parts of 64 columns one after the other.
    memory = np.arange(2 * ROWS * size).reshape(2, size // PART, ROWS, PART)
    columns = memory[0, :, 0].reshape(-1)[::16] * BYTES
    registers = keys // 2
    for operand in (registers, registers + 1):
        places = np.array(numbers(rf"add\.u32 place, \${operand}, (\d+);", code)) * wgmma.DESCRIPTOR_UNIT_BYTES
        np.testing.assert_array_equal(places, columns)
    (upper,) = numbers(r"mov\.b32 upper, (\d+);", code)
    assert upper & wgmma.SWIZZLE_128B
    assert (upper ^ wgmma.SWIZZLE_128B) * wgmma.DESCRIPTOR_UNIT_BYTES == (memory[1] - memory[0]).flat[0] * BYTES
    assert code.count(f"wgmma.mma_async.sync.aligned.m64n{keys}k16.f32.bf16.bf16") == size // 16
    # `adds` is whether a column is not zero.
    assert numbers(r"setp\.ne\.b32 adds, zero, (\d+);", code) == list(range(0, size, 16))


@pytest.mark.parametrize("size", [128, 256])
def test_8_bit_products_have_half_the_instructions_of_16_bit_ones(size):
    of_8, of_16 = (
        wgmma._product_ptx(64, [columns], kind, 32, zero_accumulator=True)
        for columns, kind in ((size, "e4m3"), (size // 2, "bf16"))
    )
    assert of_8.count("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3") == size // 32
    for pattern in (r"mov\.b32 upper, (\d+);", r"add\.u32 place, \$\d+, (\d+);"):
        assert numbers(pattern, of_8) == numbers(pattern, of_16)
    # Operands of 8 bits have no order: both lie along the contracted axis.
    assert "adds, 1, 1;" in of_8
    assert "adds, 1, 1, 0, 0;" not in of_8


def test_products_of_further_operands_add_to_the_accumulator():
    registers, first = 32, 64
    code = wgmma._product_ptx(64, [128, 64], "bf16", first, zero_accumulator=False)
    for pair, size in enumerate((128, 64)):
        for operand in (first + 2 * pair, first + 2 * pair + 1):
            assert len(numbers(rf"add\.u32 place, \${operand}, (\d+);", code)) == size // 16
    assert numbers(r"mov\.b32 upper, (\d+);", code) == [wgmma.SWIZZLE_128B | 128, wgmma.SWIZZLE_128B | 64]
    assert all(numbers(r"setp\.ne\.b32 adds, zero, (\d+);", code))
    assert f"${registers - 1}}}" in code
    assert code.count("wgmma.commit_group") == 1
