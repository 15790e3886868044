"""The compiled kernels: one shared library, loaded when a kernel of it is first asked for."""

import ctypes
import functools
import importlib.util

import jax

MODULE = "ejkernel_cuda.compiled_kernels"
"""What `Requires.modules` calls the library: it lies where an extension module of this name would."""


@functools.cache
def registered(symbol: str) -> str:
    """Registers a handler of the library with XLA.

    Args:
        symbol: The handler's name in the library.

    Returns:
        The name that `jax.ffi.ffi_call` knows it by, which is the same.

    Raises:
        ModuleNotFoundError: This installation of ejkernel-cuda has no compiled kernels.
    """
    found = importlib.util.find_spec(MODULE)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(
            f"{MODULE}: this installation of ejkernel-cuda was made without compiling the kernels"
        )
    library = ctypes.CDLL(found.origin)
    jax.ffi.register_ffi_target(symbol, jax.ffi.pycapsule(getattr(library, symbol)), platform="CUDA")
    return symbol
