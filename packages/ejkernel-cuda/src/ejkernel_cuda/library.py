"""Loads the shared library of compiled kernels when a kernel is first called."""

import ctypes
import functools
import importlib.util

import jax

COMPILED_MODULE = "ejkernel_cuda.compiled_kernels"
"""The module name that `Requires.modules` checks: the library has the path of an extension module of this name."""


@functools.cache
def register_handler(handler_name: str) -> str:
    """Registers a handler of the library with XLA.

    Args:
        handler_name: The handler's name in the library.

    Returns:
        The handler's name for `jax.ffi.ffi_call`, which is the same as in the library.

    Raises:
        ModuleNotFoundError: This installation of ejkernel-cuda was built without the kernels.
    """
    module_spec = importlib.util.find_spec(COMPILED_MODULE)
    if module_spec is None or module_spec.origin is None:
        raise ModuleNotFoundError(
            f"{COMPILED_MODULE}: this installation of ejkernel-cuda was made without compiling the kernels"
        )
    shared_library = ctypes.CDLL(module_spec.origin)
    jax.ffi.register_ffi_target(handler_name, jax.ffi.pycapsule(getattr(shared_library, handler_name)), platform="CUDA")
    return handler_name
