"""Hashes of programs, by what each of their values is computed from."""

import base64
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ejkernel_conformance.confirm.programs.normalise import LOCATIONS, SYMBOLS, digest, normalised
from ejkernel_conformance.confirm.programs.stand_ins import TRITON, triton_texts

NAMES_ONLY = frozenset({"kernel_hash", "name", "mhlo.frontend_attributes", "jax.uses_shape_polymorphism"})
"""Attributes that say how something is called."""

Programs = dict[str, dict[str, Any]]
"""Label of a call -> the hash of its program, and of each kernel in it."""


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
            self.texts += [f"{target}\n{text}" for key, text in triton_texts.items() if key in str(rest)]
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
