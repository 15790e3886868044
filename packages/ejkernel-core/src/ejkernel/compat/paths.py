"""Old import paths and old names: the tables, and the finder that makes each path importable.

`import ejkernel.callib` gives the module that the table names, the same object under both names, and so does the path
of a module below it, `ejkernel.xla_utils.cumsum`. The finder answers to names of the tables alone, and imports nothing
before one of them is asked for.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_DELTA_RULE_MODULE = "ejkernel.compat.delta_rule"
_ENGINE_MODULE = "ejkernel.compat.engine"
_QUANTIZED_ARRAY_MODULE = "ejkernel.compat.quantized_array"
_QUANTIZATION_RUNTIME_MODULE = "ejkernel.compat.quantization_runtime"
_TURBOQUANT_MODULE = "ejkernel.quantization.turboquant"

OLD_PATHS = {
    "ejkernel.benchmarks": "ejkernel.compat.benchmarks",
    "ejkernel.callib": "ejkernel.compat.callib",
    "ejkernel.callib._ejit": "ejkernel.compat.callib",
    "ejkernel.ejgpu": "ejkernel.compat.ejgpu",
    "ejkernel.kernel_registry": "ejkernel.compat.kernel_registry",
    "ejkernel.kernels": "ejkernel.compat.kernels",
    "ejkernel.kernels._registry": "ejkernel.compat.kernel_registry",
    "ejkernel.kernels._pallas.tpu.ragged_gated_delta_rule._interface": _DELTA_RULE_MODULE,
    "ejkernel.kernels._xla.gated_delta_rule._xla_impl_fwd": _DELTA_RULE_MODULE,
    "ejkernel.kernels._xla.ragged_gated_delta_rule._xla_impl_fwd": _DELTA_RULE_MODULE,
    "ejkernel.loggings": "ejkernel.compat.loggings",
    "ejkernel.modules.base": "ejkernel.compat.base",
    "ejkernel.modules.operations.multi_head_latent_attention": "ejkernel.modules.operations.flash_mla",
    "ejkernel.modules.operations.pooling": "ejkernel.modules.operations.mean_pooling",
    "ejkernel.modules.operations.recurrent": "ejkernel.modules.operations.recurrent_attention",
    "ejkernel.ops.config.cache": _ENGINE_MODULE,
    "ejkernel.ops.core": _ENGINE_MODULE,
    "ejkernel.ops.core.kernel": _ENGINE_MODULE,
    "ejkernel.ops.core.types": _ENGINE_MODULE,
    "ejkernel.ops.execution.batch": _ENGINE_MODULE,
    "ejkernel.ops.execution.tuning": _ENGINE_MODULE,
    "ejkernel.ops.registry": _ENGINE_MODULE,
    "ejkernel.ops.utils": _ENGINE_MODULE,
    "ejkernel.ops.utils.datacarrier": _ENGINE_MODULE,
    "ejkernel.ops.utils.fingerprint": _ENGINE_MODULE,
    "ejkernel.ops.utils.serialize": _ENGINE_MODULE,
    "ejkernel.quantization.quantized_array": _QUANTIZED_ARRAY_MODULE,
    "ejkernel.quantization.runtime": _QUANTIZATION_RUNTIME_MODULE,
    "ejkernel.quantization.turboquant.codebook": _TURBOQUANT_MODULE,
    "ejkernel.quantization.turboquant.matrices": _TURBOQUANT_MODULE,
    "ejkernel.quantization.turboquant.ops": _TURBOQUANT_MODULE,
    "ejkernel.quantization.turboquant.packing": _TURBOQUANT_MODULE,
    "ejkernel.utils": "ejkernel.compat.utils",
    "ejkernel.xla_utils": "ejkernel.compat.xla_utils",
    "ejkernel.xla_utils.shardings": "ejkernel.compat.xla_utils.sharding",
    "ejkernel.xla_utils.utils": "ejkernel.compat.xla_utils",
}
"""Old path -> module that has its names. The modules of a package that is listed have their old paths with it."""

OLD_NAMES: dict[str, dict[str, str]] = {
    "ejkernel.ops": dict.fromkeys(
        (
            "Cfg",
            "Out",
            "abstractify",
            "benchmark",
            "default_key_builder_with_sharding",
            "from_json",
            "sharding_fingerprint",
            "to_json",
        ),
        _ENGINE_MODULE,
    ),
    "ejkernel.ops.config": {"Tuner": _ENGINE_MODULE},
    "ejkernel.ops.config.selection": dict.fromkeys(
        (
            "AutotunePolicy",
            "Cfg",
            "ConfigSelectorChain",
            "Out",
            "Tuner",
            "forward_autotune_only",
            "policy_override",
        ),
        _ENGINE_MODULE,
    ),
    "ejkernel.ops.execution": {"benchmark": _ENGINE_MODULE},
    "ejkernel.quantization": dict.fromkeys(
        (
            "QuantizationAxis",
            "QuantizationMode",
            "QuantizedArray",
            "dense_quantized_matmul",
            "prepack_quantized_array",
            "quantize_array",
        ),
        _QUANTIZED_ARRAY_MODULE,
    )
    | {"QuantRuntimeConfig": _QUANTIZATION_RUNTIME_MODULE},
}
"""Module -> old name -> module that has it."""


class _AliasLoader(importlib.abc.Loader):
    """Loads a module under an old path: as the module that has its names."""

    def __init__(self, target: str) -> None:
        self.target = target

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.target)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # Python has set that of the old path


class _OldPackageLoader(importlib.abc.Loader):
    """Loads a package that only holds old paths."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = "Old import paths; `ejkernel.compat.paths` has their table."


class OldPathFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of `OLD_PATHS`, those of the packages among them, and the packages above them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("ejkernel."):
            return None
        if fullname in OLD_PATHS:
            return importlib.machinery.ModuleSpec(fullname, _AliasLoader(OLD_PATHS[fullname]))
        parent, _, name = fullname.rpartition(".")
        newer = f"{OLD_PATHS[parent]}.{name}" if parent in OLD_PATHS else ""
        if newer and _is_package(OLD_PATHS[parent]) and importlib.util.find_spec(newer) is not None:
            return importlib.machinery.ModuleSpec(fullname, _AliasLoader(newer))
        above = any(old.startswith(f"{fullname}.") for old in OLD_PATHS)
        if above and importlib.machinery.PathFinder.find_spec(fullname, path) is None:
            return importlib.machinery.ModuleSpec(fullname, _OldPackageLoader(), is_package=True)
        return None


def _is_package(name: str) -> bool:
    return hasattr(importlib.import_module(name), "__path__")


def resolve_old_name(module: str, name: str) -> Any:
    """Returns what a module answers to an old name.

    Raises:
        AttributeError: The old name is not in the table.
    """
    home = OLD_NAMES.get(module, {}).get(name)
    if home is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def install_old_paths() -> None:
    """Makes the old paths importable; once is enough.

    The finder comes before Python's own, which would find the modules of a listed package by their files and load them
    a second time, under the old path.
    """
    if not any(isinstance(finder, OldPathFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, OldPathFinder())
