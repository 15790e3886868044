"""Independent loops in float64, from a file that a run names: what they say of a call, its reference has to say too."""

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

VARIABLE = "EJKERNEL_RANDOM_LOOPS"
"""The file, in the environment of workers."""


@functools.cache
def named_loops() -> Mapping[str, Callable[[Any], Any]]:
    """Returns `LOOPS` of the named file: operation -> (argument record) -> its first output, None where there is no
    loop.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return {}
    spec = importlib.util.spec_from_file_location("ejkernel_random_loops", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"loops: got {path!r}, wants a Python file")
    sys.path.insert(0, str(Path(path).resolve().parent))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LOOPS


def differs(op: str, args: Any, output: np.ndarray) -> str | None:
    """Returns how the reference's output differs from the loop's, empty if it does not; None without a loop.

    Args:
        op: The operation.
        args: Its argument record, in float64.
        output: The reference's first output.
    """
    loop = named_loops().get(op)
    found = None if loop is None else loop(args)
    if found is None:
        return None
    found = np.asarray(found, np.float64).reshape(output.shape)
    said = ~np.isnan(found)
    largest = np.max(np.abs(found[said]), initial=0.0)
    error = np.max(np.abs(output[said] - found[said]), initial=0.0)
    # Both compute in float64, in another order.
    return (
        ""
        if error <= 1e-6 * max(largest, 1.0)
        else f"the reference is off from the loop by {error:.2g} of {largest:.2g}"
    )
