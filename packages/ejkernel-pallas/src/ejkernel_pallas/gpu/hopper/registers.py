"""Access to the registers of a thread, for code below Pallas."""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector


def int32_type() -> Any:
    """Returns the type of a register of 32 bits."""
    return ir.IntegerType.get_signless(32)


def int32_constant(value: int) -> Any:
    """Returns an int32 immediate constant."""
    return arith.constant(int32_type(), ir.IntegerAttr.get(int32_type(), value))


def as_int32(unsigned_word: int) -> int:
    """Returns the int32 that has the bits of a word."""
    return unsigned_word - 2**32 if unsigned_word >= 2**31 else unsigned_word


def float32_constant(value: float) -> Any:
    """Returns a float32 constant."""
    return arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), value))


def unpack_row_value(register: Any) -> Any:
    """Returns the value in a register of a vector of rows."""
    return _extract_element(register, 0) if isinstance(register.type, ir.VectorType) else register


def unpack_pair(register: Any) -> tuple[Any, Any]:
    """Returns the two neighbouring elements of a row in a register of a tile."""
    return _extract_element(register, 0), _extract_element(register, 1)


def replace_registers(array: Any, values: list[Any]) -> Any:
    """Returns an array of another one's layout with given registers."""
    registers = array.registers.copy()
    for index, value in enumerate(values):
        registers.flat[index] = value
    return mgpu.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=array.is_signed)


def row_vector_like(tile: Any, value: Any) -> Any:
    """Returns the same value for every row of a tile, as a vector of rows."""
    return mgpu.FragmentedArray.splat(value, tile.shape[:1], layout=tile.layout.reduce((1,)))


def replace_row_values(rows: Any, values: list[Any]) -> Any:
    """Returns a vector like `rows`, with a value for each of a thread's two rows."""
    register_types = [register.type for register in rows.registers.flat]
    is_vector_register = (isinstance(register_type, ir.VectorType) for register_type in register_types)
    typed_values = zip(register_types, values, is_vector_register, strict=True)
    return replace_registers(
        rows, [vector.broadcast(register_type, x) if is_vector else x for register_type, x, is_vector in typed_values]
    )


def _extract_element(register: Any, index: int) -> Any:
    return vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([index]))
