"""Conditions on the values of a call's integer arguments: lengths, starts, counts and tables must fit each other.

Values that lie on the host or on a device are checked before the call runs; a mistake is a ValueError that names the
argument. Values that are traced cannot be read. In a `check_values()` block the call puts the same conditions into the
traced program, as `jax.experimental.checkify.check`.
"""

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import _compat
from ejkernel.types.block_policy import BlockPolicy
from ejkernel.types.integers import clamp_to_int32

_policy = BlockPolicy()
_READABLE_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Condition:
    """One condition on the values of integer arguments.

    Attributes:
        name: The argument that is wrong where the condition does not hold.
        arrays: The arrays it is about, that argument's first.
        holds: (`numpy` or `jax.numpy`, the arrays) -> bool scalar. The arrays are int32 or int64.
        wants: The rest of the message after "wants".
        is_checked_by_record: Whether the argument record has checked values that can be read.
    """

    name: str
    arrays: tuple[Any, ...]
    holds: Callable[..., Any]
    wants: str
    is_checked_by_record: bool = False


Conditions = Callable[[Any], Iterable[Condition]]


def check_values() -> AbstractContextManager[None]:
    """Lets the calls traced inside of the block check the values of their lengths, starts, counts and tables.

    The checks are those of calls whose values can be read, as `jax.experimental.checkify.check`: transform the function
    with `checkify.checkify`, which returns the error with the result, or JAX refuses to compile it. Outside of the
    block a traced call has no checks, and costs nothing for them.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from jax.experimental import checkify
        from ejkernel.modules import flash_attention
        from ejkernel.ops import check_values

        x = jax.random.normal(jax.random.key(0), (1, 8, 2, 16))

        def step(bounds):
            return flash_attention(x, x, x, cum_seqlens_q=bounds)

        with check_values():
            error, output = jax.jit(checkify.checkify(step))(jnp.array([0, 5, 9]))
        assert "cum_seqlens_q: got [0 5 9]" in error.get()
        ```
    """
    return _policy.block()


def check(conditions: Conditions | None, args: Any, validate: Callable[[Any], object] | None = None) -> None:
    """Checks the values of an argument record that can be read and, in a `check_values` block, those that are traced.

    Args:
        conditions: What they have to satisfy.
        args: The record.
        validate: Checks the record's shapes. It is called where a condition does not hold: shapes that are wrong, too,
            are the better error.

    Raises:
        ValueError: A condition does not hold; or an argument is of 64-bit integers that JAX would wrap around.
    """
    _check_numpy_width(args)
    check_conditions(() if conditions is None else tuple(conditions(args)), lambda: validate and validate(args))


def check_conditions(stated: tuple[Condition, ...], validate: Callable[[], object] = lambda: None) -> None:
    """Checks conditions as `check` does.

    Args:
        stated: The conditions.
        validate: Called before the error of a condition is raised.

    Raises:
        ValueError: A condition does not hold.
    """
    arrays = {id(array): array for condition in stated for array in condition.arrays}
    readable = {key: array for key, array in arrays.items() if _is_readable_on_host(array)}
    for array in readable.values():
        if isinstance(array, jax.Array):
            array.copy_to_host_async()  # all copies are under way before the first is waited for
    host: dict[int, Any] = {}
    for condition in stated:
        if readable.keys() >= set(map(id, condition.arrays)):
            if not condition.is_checked_by_record:
                _check_now(condition, [_host_values(host, array) for array in condition.arrays], validate)
        elif _policy.is_on and any(map(_compat.is_tracer, condition.arrays)):
            _check_at_run_time(condition)


def are_integer_arrays(*arrays: Any) -> bool:
    """Returns whether all are arrays of integers, so that conditions on them can be stated."""
    return all(x is not None and hasattr(x, "shape") and jnp.issubdtype(x.dtype, jnp.integer) for x in arrays)


def _is_readable_on_host(array: Any) -> bool:
    if isinstance(array, jax.Array):
        return not _compat.is_tracer(array) and array.is_fully_addressable
    return isinstance(array, np.ndarray | np.generic)


def _host_values(fetched_values: dict[int, Any], array: Any) -> np.ndarray:
    """Returns the numbers of an array, in 32 bits with a sign or more; `fetched_values` has those that were fetched
    before."""
    value = fetched_values.get(id(array))
    if value is None:
        value = np.asarray(array)
        value = fetched_values[id(array)] = value if value.dtype in _READABLE_DTYPES else value.astype(np.int64)
    return value


def _check_now(condition: Condition, values: list[np.ndarray], validate: Callable[[], object]) -> None:
    if not condition.holds(np, *values):
        validate()
        shown = np.array2string(values[0], threshold=16, separator=", ")
        raise ValueError(f"{condition.name}: got {shown}, wants {condition.wants}")


def _check_at_run_time(condition: Condition) -> None:
    from jax.experimental import checkify

    arrays = [jnp.asarray(clamp_to_int32(x)) for x in condition.arrays]
    wants = condition.wants.replace("{", "{{").replace("}", "}}")
    message = f"{condition.name}: got {{values}}, wants {wants}"
    checkify.check(jnp.all(condition.holds(jnp, *arrays)), message, values=arrays[0])


def _check_numpy_width(args: Any) -> None:
    """Checks NumPy's 64-bit integers, which JAX takes for 32 bits of them unless it has 64.

    Raises:
        ValueError: One would become another number.
    """
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.dtype.itemsize == 8 and value.size:
            narrow = np.iinfo(jax.dtypes.canonicalize_dtype(value.dtype))
            if value.min() < narrow.min or value.max() > narrow.max:
                raise ValueError(
                    f"{field.name}: got NumPy's {value.dtype} from {value.min()} to {value.max()}, wants values from "
                    f"{narrow.min} to {narrow.max}, or jax_enable_x64=True: JAX would wrap other values around"
                )
