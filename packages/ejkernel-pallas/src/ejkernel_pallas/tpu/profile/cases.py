"""The cases to profile: functions that a worker process can import by name, and their arguments."""

import dataclasses
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_IMPORTED_FILE_MODULE = "_ejkernel_profiled"
SINGLE_DEVICE_MESH: Mapping[str, int] = {"x": 1}
"""The axes of the mesh of a single device."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A function to compile, and its arguments.

    Attributes:
        function: A JAX function.
        args: Its arguments, which may be pytrees. Leaves are `jax.ShapeDtypeStruct`s, or arrays if their values decide
            what the kernel does: lengths, page tables, group sizes and masks that it prefetches.
        flops: The number of useful operations, for MFU; None if unknown.
        min_hbm_bytes: The bytes that any kernel has to read from and write to HBM; None if unknown.
        mesh_axes: Axes of the device mesh, and their sizes; one device by default. The function gets the mesh with
            `jax.sharding.get_abstract_mesh()`; the device with the smallest indices is simulated.
        partition_specs: `PartitionSpec`s of the arguments; by default they are replicated.
    """

    function: Callable[..., Any]
    args: Sequence[Any]
    flops: float | None = None
    min_hbm_bytes: float | None = None
    mesh_axes: Mapping[str, int] = dataclasses.field(default_factory=lambda: SINGLE_DEVICE_MESH)
    partition_specs: Sequence[Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A case that a worker process builds, compiles and profiles.

    Attributes:
        label: The name of the case in reports.
        build: `"module:function"` or `"file.py:function"` of a function that returns a `Workload`.
        kwargs: Keyword arguments of that function; they are pickled.
        operands_may_stay_in_vmem: Lets XLA keep operands in VMEM between kernels, as it does by default. Otherwise
            every kernel reads its operands from HBM, so that estimates of kernels can be compared.
        compiler_options: Further compiler options of XLA.
        max_simulation_seconds: The limit on the time for simulating a kernel.
    """

    label: str
    build: str
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    operands_may_stay_in_vmem: bool = False
    compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    max_simulation_seconds: float = 120.0

    def workload(self) -> Workload:
        """Builds the workload."""
        return find_function(self.build)(**self.kwargs)

    def options(self) -> dict[str, Any]:
        """Returns the compiler options."""
        return {**({} if self.operands_may_stay_in_vmem else {"xla_msa_enable": False}), **self.compiler_options}


def find_function(path: str) -> Callable[..., Any]:
    """Imports `"module:function"` or `"file.py:function"`.

    Raises:
        ValueError: There is no such module, file or function.
    """
    module, _, name = path.rpartition(":")
    if not module or not name:
        raise ValueError(f"function: got {path!r}, wants 'module:function' or 'file.py:function'")
    try:
        found: Any = _import_file(module) if module.endswith(".py") else importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, FileNotFoundError) as error:
        raise ValueError(f"function: {path!r} is not there: {error}") from error
    return found


def function_path(function: Callable[..., Any]) -> str:
    """Returns the path by which another process can import a function.

    Raises:
        ValueError: Another process cannot import it, because it is local to another function.
    """
    name = getattr(function, "__qualname__", "<")
    module = inspect.getmodule(function)
    if module is None or "<" in name:
        raise ValueError(f"function: got {function!r}, wants a function of a module, which a worker process can import")
    if module.__name__ == "__main__":
        return f"{module.__file__}:{name}"
    return f"{module.__name__}:{name}"


def workload_of_function_path(
    path: str, args: Sequence[Any], flops: float | None, static_kwargs: Mapping[str, Any]
) -> Workload:
    """Builds the workload of the function with this path; `static_kwargs` are keyword arguments."""
    found = find_function(path)
    return Workload(function=lambda *arrays: found(*arrays, **static_kwargs), args=args, flops=flops)


def _import_file(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(_IMPORTED_FILE_MODULE, Path(path))
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[_IMPORTED_FILE_MODULE] = module
    spec.loader.exec_module(module)
    return module
