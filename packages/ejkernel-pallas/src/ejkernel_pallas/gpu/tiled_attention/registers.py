"""What a thread has of an array in registers, for code below Pallas."""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector


def i32() -> Any:
    """The type of a register of 32 bits."""
    return ir.IntegerType.get_signless(32)


def constant(value: int) -> Any:
    """A number that the instructions have in them, int32."""
    return arith.constant(i32(), ir.IntegerAttr.get(i32(), value))


def scalar(register: Any) -> Any:
    """What a register of a vector of rows holds."""
    return _element(register, 0) if isinstance(register.type, ir.VectorType) else register


def pair(register: Any) -> tuple[Any, Any]:
    """The two neighbours of a row that a register of a tile holds."""
    return _element(register, 0), _element(register, 1)


def with_registers(array: Any, values: list[Any]) -> Any:
    """An array of another one's layout."""
    registers = array.registers.copy()
    for place, value in enumerate(values):
        registers.flat[place] = value
    return mgpu.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)


def _element(register: Any, place: int) -> Any:
    return vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([place]))
