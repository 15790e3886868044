"""Stand-ins for toolchains that are not here: jax-triton, and the compiled library of ejkernel-cuda."""

import contextlib
import ctypes
import functools
import importlib
import importlib.machinery
import inspect
import sys
import types
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_conformance.confirm.programs.normalise import digest, normalised

FUSION = "enable_fp_fusion"
TRITON = "ejkernel_triton_launch"
"""The target that a Triton launch is lowered to here."""
POINTERS = {
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "float32": "*fp32",
    "float64": "*fp64",
    "int64": "*i64",
    "int32": "*i32",
    "int16": "*i16",
    "int8": "*i8",
    "uint32": "*u32",
    "uint8": "*u8",
    "bool": "*i1",
    "float8_e4m3fn": "*fp8e4nv",
    "float8_e5m2": "*fp8e5",
}


@contextlib.contextmanager
def stand_ins() -> Generator[set[str]]:
    """Lets dispatch find jax-triton and the library of ejkernel-cuda, in whose place calls with the same content stand.

    Yields:
        The handlers of the library that were asked for so far.
    """
    handlers: set[str] = set()
    _install_jax_triton()
    finder = _LibraryFinder()
    saved = jax.ffi.register_ffi_target, jax.ffi.pycapsule, ctypes.CDLL
    sys.meta_path.insert(0, finder)
    jax.ffi.register_ffi_target = lambda name, *_, **__: handlers.add(name)
    jax.ffi.pycapsule = lambda pointer: pointer
    ctypes.CDLL = _Library  # type: ignore[misc,assignment]
    _forget_what_is_lacking()
    try:
        yield handlers
    finally:
        _forget_what_is_lacking()
        sys.meta_path.remove(finder)
        jax.ffi.register_ffi_target, jax.ffi.pycapsule, ctypes.CDLL = saved  # type: ignore[misc]
        for name in ("jax_triton", "jax_triton.triton_lib"):
            if getattr(sys.modules.get(name), "stands_in", False):
                del sys.modules[name]


def _forget_what_is_lacking() -> None:
    """Lets dispatch ask anew which modules are here: it asks once a process."""
    for name in ("ejkernel.ops.toolchain", "ejkernel.ops.dispatch", "ejkernel_conformance.served"):
        _empty_caches(name)


class _LibraryFinder:
    """Finds the compiled kernels of ejkernel-cuda, where they are not compiled."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Returns the specification of the library, which is never loaded as a module."""
        found = name == "ejkernel_cuda.compiled_kernels"
        return importlib.machinery.ModuleSpec(name, None, origin=name) if found else None


class _Library:
    """Has a symbol of every name."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __getattr__(self, name: str) -> str:
        return name


def _install_jax_triton() -> None:
    module, library = types.ModuleType("jax_triton"), types.ModuleType("jax_triton.triton_lib")
    for each in (module, library):
        each.__spec__ = importlib.machinery.ModuleSpec(each.__name__, None)
        vars(each).update(stands_in=True)
        sys.modules[each.__name__] = each
    vars(library).update(triton_kernel_call_p=None)
    vars(module).update(triton_call=triton_call, triton_lib=library, __path__=[])


triton_texts: dict[str, str] = {}
"""The TTIR of what was lowered, by its digest."""


def triton_call(*arrays: Any, kernel: Any, grid: Any, input_output_aliases: Any, **rest: Any) -> Any:
    """Stands for `jax_triton.triton_call`: a custom call that holds the digest of the kernel's TTIR.

    Args:
        arrays: The inputs.
        kernel: The `triton.jit` function.
        grid: Programs.
        input_output_aliases: Number of a parameter that gets an array -> number of the result that takes its memory.
        rest: Arrays by the names of their parameters, `out_shape` or `out_type`, options, and the kernel's constants.
    """
    outputs = list(rest.pop("out_shape") if "out_shape" in rest else rest.pop("out_type"))
    options = {name: rest.pop(name) for name in ("num_warps", "num_stages", "compute_capability")}
    options |= rest.pop("backend_options") if "backend_options" in rest else {FUSION: rest.pop(FUSION)}
    named = {name: rest.pop(name) for name in list(rest) if isinstance(rest[name], jax.Array)}
    # Outputs that a named array stands for have no parameter of their own: they come last.
    passed = (*arrays, *named.values(), *outputs[: len(outputs) - len(named)])
    dtypes = tuple(jnp.dtype(x.dtype).name for x in passed)
    text = _ttir(kernel, dtypes, tuple(sorted(rest.items())), tuple(options.items()))
    positions = [kernel.arg_names.index(name) for name in named]
    about = {"grid": str(grid), "options": str(options), "positions": str(positions), "ttir": digest(text)}
    triton_texts[about["ttir"]] = text
    aliases = dict(input_output_aliases)
    call = jax.ffi.ffi_call(TRITON, outputs, input_output_aliases=aliases, vmap_method="sequential")
    return call(*arrays, *named.values(), **about)


def _set_parameters(outputs: str, fusion: str) -> None:
    """Makes `triton_call` look like that of one version of jax-triton."""
    names = ("kernel", outputs, "grid", "num_warps", "num_stages", "input_output_aliases", fusion)
    kinds = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    vars(triton_call)["__signature__"] = inspect.Signature(kinds)


_set_parameters("out_shape", FUSION)


@contextlib.contextmanager
def later_jax_triton() -> Generator[None]:
    """Lets what is lowered inside the block find jax-triton 0.4 in place of 0.3."""
    _set_parameters("out_type", "backend_options")
    _forget_version()
    try:
        yield
    finally:
        _set_parameters("out_shape", FUSION)
        _forget_version()


def _forget_version() -> None:
    _empty_caches("ejkernel_triton._compat")
    jax.clear_caches()


def _empty_caches(name: str) -> None:
    """Empties the caches of the functions that a module has, if it is loaded."""
    module = sys.modules.get(name)
    for function in tuple(vars(module).values()) if module else ():
        if forget := getattr(function, "cache_clear", None):
            forget()


@functools.cache
def _ttir(kernel: Any, dtypes: tuple[str, ...], constants: tuple[Any, ...], given: tuple[Any, ...]) -> str:
    """Returns a kernel's TTIR after inlining, as its compiler makes it for arrays aligned to 16 bytes."""
    # By name: core does not depend on Triton.
    compiler: Any = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget
    options = dict(given)
    # Not strict: constants follow the arrays among a kernel's parameters.
    signature = {name: POINTERS[dtype] for name, dtype in zip(kernel.arg_names, dtypes, strict=False)}
    signature |= dict.fromkeys(dict(constants), "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(dtypes))}
    source = compiler.ASTSource(kernel, signature, dict(constants), aligned)
    backend = compiler.make_backend(target("cuda", options.pop("compute_capability"), 32))
    parsed = backend.parse_options(options)
    ir: Any = importlib.import_module("triton._C.libtriton").ir
    context, stages = ir.context(), dict[str, Any]()
    ir.load_dialects(context)
    backend.load_dialects(context)
    backend.add_stages(stages, parsed, source.language)
    helpers = backend.get_codegen_implementation(parsed), backend.get_module_map()
    module = source.make_ir(backend.target, parsed, *helpers, context)
    module = stages["ttir"](module, dict(vars(parsed)))
    return normalised(str(module))
