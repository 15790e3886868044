"""Old import paths: one table, and the finder that makes each path importable.

`import ejkernel.callib` gives the module that the table names, the same object under both names. The finder stands
after Python's own, so that it is asked only about modules that no file has, and it imports nothing before that.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

_ENGINE = "ejkernel.compat.engine"
_DELTA_RULE = "ejkernel.compat.delta_rule"

OLD_PATHS = {
    "ejkernel.benchmarks": "ejkernel.compat.benchmarks",
    "ejkernel.callib": "ejkernel.compat.callib",
    "ejkernel.callib._ejit": "ejkernel.compat.callib",
    "ejkernel.kernel_registry": "ejkernel.compat.kernel_registry",
    "ejkernel.kernels": "ejkernel.compat.kernels",
    "ejkernel.kernels._registry": "ejkernel.compat.kernel_registry",
    "ejkernel.kernels._pallas.tpu.ragged_gated_delta_rule._interface": _DELTA_RULE,
    "ejkernel.kernels._xla.gated_delta_rule._xla_impl_fwd": _DELTA_RULE,
    "ejkernel.kernels._xla.ragged_gated_delta_rule._xla_impl_fwd": _DELTA_RULE,
    "ejkernel.modules.operations.multi_head_latent_attention": "ejkernel.modules.operations.flash_mla",
    "ejkernel.modules.operations.pooling": "ejkernel.modules.operations.mean_pooling",
    "ejkernel.modules.operations.recurrent": "ejkernel.modules.operations.recurrent_attention",
    "ejkernel.ops.config.cache": _ENGINE,
    "ejkernel.ops.core": _ENGINE,
    "ejkernel.ops.core.kernel": _ENGINE,
    "ejkernel.ops.core.types": _ENGINE,
    "ejkernel.ops.execution.batch": _ENGINE,
    "ejkernel.ops.execution.tuning": _ENGINE,
    "ejkernel.ops.registry": _ENGINE,
    "ejkernel.ops.utils": _ENGINE,
    "ejkernel.ops.utils.datacarrier": _ENGINE,
    "ejkernel.ops.utils.fingerprint": _ENGINE,
    "ejkernel.ops.utils.serialize": _ENGINE,
    "ejkernel.quantization.quantized_array": "ejkernel.compat.quantized_array",
    "ejkernel.xla_utils.shardings": "ejkernel.xla_utils.sharding",
    "ejkernel.xla_utils.utils": "ejkernel.xla_utils",
}
"""Old path -> module that has its names."""


class _Alias(importlib.abc.Loader):
    """Loads a module under an old path: as the module that has its names."""

    def __init__(self, target: str) -> None:
        self.target = target

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.target)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # Python has set that of the old path


class _Package(importlib.abc.Loader):
    """Loads a package that only holds old paths."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = "Old import paths; `ejkernel.compat.paths` has their table."


class OldPaths(importlib.abc.MetaPathFinder):
    """Finds the modules of `OLD_PATHS`, and the packages above them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in OLD_PATHS:
            return importlib.machinery.ModuleSpec(fullname, _Alias(OLD_PATHS[fullname]))
        if any(old.startswith(f"{fullname}.") for old in OLD_PATHS):
            return importlib.machinery.ModuleSpec(fullname, _Package(), is_package=True)
        return None


def install() -> None:
    """Makes the old paths importable; once is enough."""
    if not any(isinstance(finder, OldPaths) for finder in sys.meta_path):
        sys.meta_path.append(OldPaths())
