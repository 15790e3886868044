"""One module per operation. Every public name of `ejkernel.modules` is here too.

The name of an operation is its function, here as in `ejkernel.modules`, whichever was imported first; what else its
module defines comes from `from ejkernel.modules.operations.flash_attention import FlashAttention`.

`OPS`, the list that dispatch, the command line, the docs and the tests go by, consists of the operations of
`ejkernel.modules.exports`. It is put together when it is first asked for, so that importing one operation does not
import the others.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ejkernel.modules.exports import EXPORTS, MODULE_OF_NAME, defining_module, public_names

if TYPE_CHECKING:
    from ejkernel.modules import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
    from ejkernel.ops.model import Op

    OPS: tuple[Op, ...]

__all__ = ["EXPORTS", "OPS"]


class _OperationsModule(ModuleType):
    """The class of this package. Python binds a submodule to its name in the package; this class binds the name of an
    operation to its function instead.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and name in MODULE_OF_NAME:
            value = vars(value)[name]
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _OperationsModule


def __getattr__(name: str) -> Any:
    if name == "OPS":
        value: Any = tuple(importlib.import_module(f"{__name__}.{operation}").OP for operation in EXPORTS)
    else:
        module = defining_module(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *public_names()})
