"""What the calls of implementations lower to, on a machine without their device, so that two trees can be compared.

A change of names or of files changes the digest of a kernel's sources, and must leave every program as it is. For each
implementation, each conformance case that it serves on a chip is lowered, alone and with its gradients, and a hash of
the program is kept. `carrying` compares the hashes of two trees.

A program's hash covers what every result is computed from: operations, their attributes and types, and kernels. It does
not cover names of functions, locations, or the order of operations that do not depend on each other. Kernels count as

- the Mosaic GPU module, without locations and with its symbols numbered;
- Triton's TTIR after inlining, with grid, warps, stages and options, from which the compiler makes PTX;
- the target of an FFI call, with its attributes and operands. Of the C++ there are two hashes for each target: one of
  its text, and, where nvcc is installed, one of the machine code of each kernel.

The file imports nothing of this package at its top but `cubins`, which is next to it, and runs as a script against the
packages of another tree:

    PYTHONPATH=<packages/*/src of the other tree> python programs.py --out before.json --impl triton
"""

import argparse
import base64
import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import json
import platform
import re
import sys
import time
import types
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# A script finds `cubins` next to it, and must not load this package, which may be that of the other tree.
cubins: Any = importlib.import_module("cubins" if __name__ == "__main__" else "ejkernel_conformance.confirm.cubins")

FORMAT = 1
LOWERED_FOR = {"tpu": "tpu", "gpu": "cuda"}
TOOLCHAIN = ("jax", "jaxlib", "triton", "numpy")
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
LOCATIONS = re.compile(r"\s*loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|^#loc.*\n?", re.MULTILINE)
SYMBOLS = re.compile(r'@"[^"]*"|@[\w$.]+|sym_name = "[^"]*"')
VALUES = re.compile(r"%[\w$.-]+")
FUNCTIONS = re.compile(r"(?=^ *(?:tt\.)?func\.?(?:func)? )", re.MULTILINE)
GRADIENTS = ", with gradients"
"""What the label of a differentiated call ends with."""
NAMES_ONLY = frozenset({"kernel_hash", "name", "mhlo.frontend_attributes", "jax.uses_shape_polymorphism"})
"""Attributes that say how something is called."""

Programs = dict[str, dict[str, Any]]
"""Label of a call -> the hash of its program, and of each kernel in it."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes what the calls of implementations lower to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--impl", action="append", default=[], help="these implementations alone")
    parser.add_argument("--op", action="append", default=[], help="these operations alone")
    parser.add_argument("--chip", default="h200", help="a name in ejkernel.ops.device.KINDS")
    parser.add_argument("--against", type=Path, help="leave out what has the same digest in this file")
    parser.add_argument("--texts", type=Path, help="folder for the programs and kernels as text")
    args = parser.parse_args(arguments)
    _prefer_path()
    collect(args.out, args.impl, args.op, args.chip, args.against, args.texts)


def _prefer_path() -> None:
    """Lets packages on the path come before those that the environment has in editable form by an import hook."""
    for finder in [x for x in sys.meta_path if "editable" in type(x).__module__]:
        if importlib.machinery.PathFinder.find_spec("ejkernel_cuda"):
            sys.meta_path.remove(finder)


def collect(
    out: Path,
    names: Sequence[str] = (),
    ops: Sequence[str] = (),
    chip: str = "h200",
    against: Path | None = None,
    texts: Path | None = None,
) -> dict[str, Any]:
    """Writes what the calls of implementations lower to, and returns it.

    Args:
        out: File to write. What an earlier call left in it is kept where the same sources made it.
        names: Implementations; none for all that have evidence.
        ops: Operations; none for all.
        chip: The chip that they are lowered for.
        against: Another such file: what has the same digest there is left out.
        texts: Folder for the programs and kernels as text.
    """
    with stand_ins() as handlers:
        other = json.loads(against.read_text()) if against else {"digests": {}}
        subjects = [x for x in listed(names, ops, chip) if other["digests"].get(x.key) != x.digest]
        content: dict[str, Any] = {
            "format": FORMAT,
            "chip": chip,
            "toolchain": toolchain(),
            "tree": tree_digest(),
            "whole": all(x.is_whole for x in subjects),
            "digests": {x.key: x.digest for x in subjects},
            "programs": {x.key: {} for x in subjects},
            "sources": {},
            "machine_code": {},
            "cases": {x.key: x.cases for x in subjects},
        }
        _keep_earlier(out, content)
        for subject in subjects:
            began, made = time.monotonic(), content["programs"][subject.key]
            _add_programs(subject, made, handlers, texts)
            files = sources_of(made, handlers)
            content["sources"][subject.key] = {name: digest(tokens(path)) for name, path in files.items()}
            content["machine_code"][subject.key] = machine_code(files, chip)
            out.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
            print(f"{subject.key}: {len(made)} programs, {time.monotonic() - began:.0f} s", flush=True)
        out.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
        return content


def _add_programs(subject: "Listed", made: Programs, handlers: set[str], texts: Path | None) -> None:
    """Lowers the calls of an implementation that are not yet there."""
    for label, call in subject.calls():
        if label in made:
            continue
        try:
            made[label] = summary(call, handlers, texts and texts / _file_name(subject.key, label))
        except Exception as error:
            # An argument that has no gradient, such as slopes: the program without gradients stands for the call.
            if isinstance(error, NotImplementedError) and label.endswith(GRADIENTS):
                continue
            error.add_note(f"{subject.key} on {label} cannot be lowered")
            raise
    # jax-triton 0.4 passes memory that an output takes over in another way.
    again = [label for label, one in made.items() if one["aliases"] and "later" not in one]
    if again:
        with later_jax_triton():
            calls = dict(subject.calls())
            for label in again:
                made[label]["later"] = summary(calls[label], handlers)["program"]


def _keep_earlier(out: Path, content: dict[str, Any]) -> None:
    """Takes over what a file has of the same sources, chip and toolchain: a run that was ended is continued."""
    if not out.exists():
        return
    earlier = json.loads(out.read_text())
    if any(earlier.get(key) != content[key] for key in ("format", "chip", "toolchain", "tree")):
        return
    for key, programs in earlier["programs"].items():
        if earlier["digests"][key] == content["digests"].get(key, earlier["digests"][key]):
            for part in ("programs", "digests", "sources", "cases", "machine_code"):
                content[part].setdefault(key, earlier.get(part, {}).get(key, {}))
            content["programs"][key] = programs


def _file_name(key: str, label: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", f"{key} {label}")


def toolchain() -> dict[str, str]:
    """Returns the versions of what programs are made with."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in TOOLCHAIN:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def tree_digest() -> str:
    """Returns a digest of all Python sources that are imported here, core's among them, which no kernel's digest
    covers.
    """
    texts: list[str] = []
    for name in ("ejkernel", "ejkernel_conformance", "ejkernel_triton", "ejkernel_pallas", "ejkernel_cuda"):
        spec = importlib.util.find_spec(name)
        for folder in spec.submodule_search_locations or () if spec else ():
            texts += [digest(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).rglob("*.py"))]
    return digest("\n".join(texts))


def digest(text: str) -> str:
    """Returns sixteen hexadecimal digits of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- calls -----------------------------------------------------------------------------------------------------------


class Listed:
    """One implementation of one family, with the operations that it is registered for."""

    def __init__(self, implementation: Any, ops: Sequence[Any], chip: str, is_whole: bool) -> None:
        from ejkernel.ops.source_digest import source_digest

        self.implementation, self.ops, self.chip, self.is_whole = implementation, ops, chip, is_whole
        self.key = f"{implementation.family}/{implementation.name}"
        self.digest = source_digest(implementation)

    @property
    def cases(self) -> list[str]:
        """The label of each case, served or refused."""
        return sorted(f"{op.name}, {case.name}" for op in self.ops for case in self._cases_of(op))

    def _cases_of(self, op: Any) -> tuple[Any, ...]:
        return (*op.cases, *self.implementation.cases_of(op))

    def calls(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yields the label of each call that it serves, and what lowers it."""
        from ejkernel.ops.device import target_device
        from ejkernel_conformance import subjects

        for op in self.ops:
            for case in self._cases_of(op):
                subject = subjects.Subject(op=op, implementation=self.implementation, case=case)
                with target_device(self.chip):
                    if subjects.refusal(subject, "forward"):
                        continue
                    both = self.implementation.backward and not subjects.refusal(subject, "backward")
                label = f"{op.name}, {case.name}"
                yield label, functools.partial(_lowered, subject, False, self.chip)
                if both:
                    yield f"{label}{GRADIENTS}", functools.partial(_lowered, subject, True, self.chip)


def listed(names: Sequence[str], ops: Sequence[str], chip: str) -> list[Listed]:
    """Returns the implementations that have evidence on a chip, by family and name."""
    from ejkernel.ops.device import find_device
    from ejkernel.ops.plugins import registry

    found, device = registry(), find_device(chip)
    served: dict[str, tuple[Any, list[Any], list[Any]]] = {}
    for op in sorted(found.ops.values(), key=lambda op: op.name):
        for each in found.implementations.get(op.name, ()):
            if each.evidence is None or not each.requires.devices & device.names or (names and each.name not in names):
                continue
            _, every, chosen = served.setdefault(f"{each.family}/{each.name}", (each, [], []))
            every.append(op)
            if not ops or op.name in ops:
                chosen.append(op)
    ordered = (served[key] for key in sorted(served))
    return [Listed(each, chosen, chip, chosen == every) for each, every, chosen in ordered if chosen]


def _lowered(subject: Any, gradients: bool, chip: str) -> Any:
    """Returns the program of a call, for a chip that need not be there."""
    from ejkernel.ops.device import find_device, target_device
    from ejkernel_conformance import running, subjects

    def call(args: Any) -> Any:
        return running.call(plan, args)

    def with_gradients(args: Any) -> Any:
        output, pull = jax.vjp(call, args)
        return output, pull(jax.tree.map(_tangent, output))

    with target_device(chip):
        plan = subjects.pinned_plan(subject.op, subject.implementation)
        traced = jax.jit(with_gradients if gradients else call).trace(subjects.abstract_args(subject.case))
        return traced.lower(lowering_platforms=(LOWERED_FOR[find_device(chip).platform],))


def _tangent(x: Any) -> Any:
    """Returns a cotangent of an output that no compiler can see through: the output itself."""
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0)


# --- the programs ----------------------------------------------------------------------------------------------------


def summary(call: Callable[[], Any], handlers: set[str], texts: Path | None = None) -> dict[str, Any]:
    """Returns the hash of a program, and the target and the hash of each kernel in it.

    Args:
        call: Lowers it.
        handlers: Targets of FFI calls whose names may change.
        texts: Where the program and its kernels are to be written as text, without a suffix; None for nowhere.
    """
    lowered = call()
    graph = _Graph(lowered.compiler_ir("stablehlo").operation, handlers)
    found = {"program": graph.hash(), "kernels": sorted(graph.kernels), "aliases": graph.aliases}
    if texts is not None:
        texts.parent.mkdir(parents=True, exist_ok=True)
        texts.with_suffix(".mlir").write_text(lowered.as_text())
        texts.with_suffix(".kernels").write_text("\n\n".join(sorted(graph.texts)))
    return found


class _Graph:
    """A module as what each of its values is computed from."""

    def __init__(self, module: Any, handlers: set[str]) -> None:
        self.functions = {
            str(op.attributes["sym_name"]).strip('"'): op for op in module.regions[0].blocks[0].operations
        }
        self.handlers = handlers
        self.kernels: list[list[str]] = []
        self.texts: list[str] = []
        self.aliases = False

    def hash(self) -> str:
        """Returns the hash of the results of `main`."""
        block = self.functions["main"].regions[0].blocks[0]
        inputs = [f"argument {n} {x.type}" for n, x in enumerate(block.arguments)]
        return digest("\n".join(self._block(block, inputs, {})))

    def _block(self, block: Any, inputs: Sequence[str], outer: Mapping[Any, str]) -> list[str]:
        """Returns what its terminator takes, after all that it does other than to compute values."""
        values = {**outer, **dict(zip(block.arguments, inputs, strict=True))}
        effects: list[str] = []
        for op in block.operations:
            operands = [values[x] for x in op.operands]
            if op.name in ("return", "func.return", "stablehlo.return"):
                return [*effects, *operands]
            for x, made in zip(op.results, self._results(op, operands, values, effects), strict=True):
                values[x] = made
        return effects

    def _results(self, op: Any, operands: list[str], values: Mapping[Any, str], effects: list[str]) -> list[str]:
        if op.name in ("call", "func.call"):
            callee = self.functions[str(op.attributes["callee"]).lstrip("@").strip('"')]
            returned = self._block(callee.regions[0].blocks[0], operands, {})
            effects += returned[: len(returned) - len(op.results)]
            return returned[len(returned) - len(op.results) :]
        types_ = [str(x.type) for x in op.results]
        regions = [self._region(region, values) for region in op.regions]
        about = self._attributes(op, types_)
        text = digest("\n".join([op.name, *about, *operands, *types_, *regions]))
        if not op.results or "has_side_effect = true" in about:
            effects.append(text)
        return [f"{text}:{n}" for n in range(len(op.results))]

    def _region(self, region: Any, values: Mapping[Any, str]) -> str:
        parts: list[str] = []
        for block in region.blocks:
            # Which region an argument is of follows from where the region's hash is used.
            inputs = [f"block {n} {x.type} {digest(' '.join(parts))}" for n, x in enumerate(block.arguments)]
            parts += self._block(block, inputs, values)
        return digest("\n".join(parts))

    def _attributes(self, op: Any, types_: Sequence[str]) -> list[str]:
        """Returns the attributes of an operation as text; of a custom call, with the kernel in place of its name."""
        given = {name: op.attributes[name] for name in sorted(_names(op.attributes))}
        if op.name != "stablehlo.custom_call":
            return [f"{name} = {self._attribute(x)}" for name, x in given.items() if name not in NAMES_ONLY]
        target = str(given.pop("call_target_name")).strip('"')
        kernel = _mosaic(given) if "mosaic_gpu" in target or target == "tpu_custom_call" else None
        rest = {name: self._attribute(x) for name, x in given.items() if name not in NAMES_ONLY}
        about = [f"{name} = {x}" for name, x in rest.items()]
        if target == TRITON:
            self.texts += [f"{target}\n{text}" for key, text in _triton_texts.items() if key in str(rest)]
        if kernel is not None:
            self.texts.append(kernel)
            about = [digest(kernel), *(x for x in about if not x.startswith(("mhlo.backend_config", "backend_config")))]
        if target == TRITON and "output_operand_alias" in str(rest.get("output_operand_aliases", "")):
            self.aliases = True
        operands = [str(x.type) for x in op.operands]
        self.kernels.append([target, digest("\n".join([*about, *operands, *types_]))])
        return about if target in self.handlers else [target, *about]

    def _attribute(self, attribute: Any) -> str:
        """Returns an attribute as text; a function that it names counts as what it computes."""
        text = LOCATIONS.sub("", str(attribute))
        return SYMBOLS.sub(lambda found: self._function(found[0].lstrip("@").strip('"')), text)

    def _function(self, name: str) -> str:
        if name not in self.functions:
            return "@"
        block = self.functions[name].regions[0].blocks[0]
        inputs = [f"argument {n} {x.type}" for n, x in enumerate(block.arguments)]
        return digest("\n".join(self._block(block, inputs, {})))


def _names(attributes: Any) -> list[str]:
    """Returns the names of an operation's attributes: iterating gives them, or pairs with their values, by JAX's
    version.
    """
    return [x if isinstance(x, str) else x.name for x in attributes]


def _mosaic(attributes: Mapping[str, Any]) -> str:
    """Returns the module in a Mosaic kernel's custom call, without locations and with its symbols numbered."""
    # The parser of MLIR that JAX lowers with; JAX has no public one.
    from jax._src.interpreters import mlir

    library: Any = importlib.import_module("jax._src.lib")
    ir: Any = importlib.import_module("jax._src.lib.mlir").ir
    context: Any = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    library.tpu.register_dialect(context)
    library.mosaic_gpu_dialect.register_dialect(context)
    if "mhlo.backend_config" in attributes:
        config: Any = ir.DictAttr(attributes["mhlo.backend_config"])
        body = ir.StringAttr(config["module"]).value_bytes
        names = sorted(set(_names(config)) - {"module"} - NAMES_ONLY)
        rest = [f"{name} = {config[name]}" for name in names]
    else:
        described = json.loads(ir.StringAttr(attributes["backend_config"]).value)
        body = base64.b64decode(described["custom_call_config"].pop("body"))
        rest = [json.dumps(described, sort_keys=True)]
    with context:
        module = ir.Module.parse(body, context=context)
        return "\n".join([*rest, normalised(str(module.operation.get_asm(enable_debug_info=False)))])


def normalised(text: str) -> str:
    """Returns a module's text without locations, with symbols and values numbered in the order in which they appear."""
    symbols: dict[str, int] = {}

    def symbol(found: re.Match[str]) -> str:
        name = found[0].removeprefix("sym_name = ").lstrip("@").strip('"')
        return f"@{symbols.setdefault(name, len(symbols))}"

    def with_numbers(function: str) -> str:
        values: dict[str, int] = {}  # each function has its own
        return VALUES.sub(lambda found: f"%{values.setdefault(found[0], len(values))}", function)

    return "".join(map(with_numbers, FUNCTIONS.split(SYMBOLS.sub(symbol, LOCATIONS.sub("", text)))))


# --- toolchains that are not here ------------------------------------------------------------------------------------


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


_triton_texts: dict[str, str] = {}
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
    _triton_texts[about["ttir"]] = text
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


# --- C++ -------------------------------------------------------------------------------------------------------------

HANDLER = re.compile(r"XLA_FFI_DEFINE_HANDLER_SYMBOL\(\s*(\w+)")
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"[^\n]*\n', re.MULTILINE)
COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
ONCE = re.compile(r"^\s*#\s*pragma\s+once\s*$", re.MULTILINE)


def sources_of(programs: Programs, handlers: set[str]) -> dict[str, Path]:
    """Returns the C++ file of each handler that programs of an implementation call, by the handler's name."""
    used = {target for one in programs.values() for target, _ in one["kernels"]} & handlers
    if not used:
        return {}
    files = sorted(_root().rglob("*.cu"))
    defined = {name: path for path in files for name in HANDLER.findall(path.read_text(encoding="utf-8"))}
    return {name: defined[name] for name in sorted(used)}


def machine_code(files: Mapping[str, Path], chip: str) -> dict[str, list[str]]:
    """Returns a digest of each kernel that the C++ files of handlers are compiled to; nothing where nvcc is missing."""
    from ejkernel.ops.device import find_device

    if not cubins.compiler():
        return {}
    capability = find_device(chip).compute_capability
    return {name: list(cubins.kernels_of(path, _root(), capability)) for name, path in files.items()}


@functools.cache
def _root() -> Path:
    """Returns the folder of the C++ sources, which their includes are relative to."""
    spec = importlib.util.find_spec("ejkernel_cuda")
    assert spec is not None  # its calls were lowered
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]).parents[1] / "csrc"


def tokens(path: Path) -> str:
    """Returns a C++ source with all that it includes of the tree, and the sources that define what those declare, as
    tokens.
    """
    seen: list[Path] = []
    texts = [_expanded(path, seen)]
    for header in list(seen):
        if header != path and header.with_suffix(".cu").is_file():
            texts.append(_expanded(header.with_suffix(".cu"), seen))
    return "\n".join(texts)


def _expanded(path: Path, seen: list[Path]) -> str:
    if path in seen:
        return ""
    seen.append(path)
    text = COMMENT.sub(lambda found: found[0] if found[0].startswith('"') else " ", path.read_text(encoding="utf-8"))

    def included(found: re.Match[str]) -> str:
        for file in (path.parent / found[1], _root() / found[1]):
            if file.is_file():
                return f" {_expanded(file, seen)} "
        return found[0]

    return " ".join(ONCE.sub("", INCLUDE.sub(included, text)).split())


if __name__ == "__main__":
    main()
