"""Loads the shared library of compiled kernels when a kernel is first called."""

import ctypes
import functools
import importlib.util

import jax

MODULE = "ejkernel_cuda.compiled_kernels"
"""The module name that `Requires.modules` checks: the library has the path of an extension module of this name."""


@functools.cache
def registered(symbol: str) -> str:
    """Registers a handler of the library with XLA.

    Args:
        symbol: The handler's name in the library.

    Returns:
        The handler's name for `jax.ffi.ffi_call`, which is the same as in the library.

    Raises:
        ModuleNotFoundError: This installation of ejkernel-cuda was built without the kernels.
    """
    found = importlib.util.find_spec(MODULE)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(
            f"{MODULE}: this installation of ejkernel-cuda was made without compiling the kernels"
        )
    library = ctypes.CDLL(found.origin)
    jax.ffi.register_ffi_target(symbol, jax.ffi.pycapsule(getattr(library, symbol)), platform="CUDA")
    return symbol
