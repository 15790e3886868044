"""Old names in modules that have others too: one table."""

import importlib
from typing import Any

_ENGINE = "ejkernel.compat.engine"
_HELPERS = "ejkernel.compat.helpers"
_QUANTIZED = "ejkernel.compat.quantized_array"

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
        _ENGINE,
    ),
    "ejkernel.ops.config": {"Tuner": _ENGINE},
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
        _ENGINE,
    ),
    "ejkernel.ops.execution": {"benchmark": _ENGINE},
    "ejkernel.quantization": dict.fromkeys(
        (
            "QuantizationAxis",
            "QuantizationMode",
            "QuantizedArray",
            "dense_quantized_matmul",
            "prepack_quantized_array",
            "quantize_array",
        ),
        _QUANTIZED,
    ),
    "ejkernel.utils": dict.fromkeys(
        (
            "assert_close",
            "get_abs_err",
            "get_err_ratio",
            "get_gpu_arch",
            "get_sharding",
            "get_stride",
            "get_strides",
            "get_tpu_generation",
            "is_fp8",
            "is_hip",
            "narrow",
        ),
        _HELPERS,
    ),
}
"""Module -> old name -> module that has it."""


def old_name(module: str, name: str) -> Any:
    """What a module answers to an old name.

    Raises:
        AttributeError: It is not in the table.
    """
    home = OLD_NAMES.get(module, {}).get(name)
    if home is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
