"""Conformance cases of the quantised matmul's kernels: 16-bit inputs in every format, and shapes with partial tiles."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.quantized_matmul import MatmulSizes, inputs
from ejkernel.modules.operations.cases.tables import Row, table
from ejkernel.modules.operations.quantized_matmul import QuantizedMatmulArguments
from ejkernel.ops.model import Case

_HALF, _BRAIN = {"dtype": jnp.float16}, {"dtype": jnp.bfloat16}
_FORMATS: tuple[Row[Any], ...] = tuple(
    (f"{name}{', transposed' if transpose else ''}", MatmulSizes(transpose=transpose, **sizes), lambda k: {}, used, ())
    for transpose in (False, True)
    for name, sizes, used in (
        ("int4, 16 bits", {"m": 1, "k": 192, **_BRAIN}, ("zeros",)),
        ("int4, partial tiles", {"m": 20, "k": 448, "n": 704, **_HALF}, ("zeros",)),
        ("int4, groups of 128", {"m": 64, "k": 512, "n": 512, "group_size": 128, **_BRAIN}, ("zeros",)),
        ("int4, groups of 64", {"m": 33, "k": 640, "n": 384, "group_size": 64, **_HALF}, ("zeros",)),
        ("int8, 16 bits", {"m": 9, "bits": 8, "k": 384, "n": 256, **_BRAIN}, ("zeros",)),
        ("nf4, 16 bits", {"mode": "nf4", "group_size": 64, "k": 192, "n": 320, **_HALF}, ()),
        ("mxfp4, 16 bits", {"mode": "mxfp4", "n": 256, "k": 384, **_BRAIN}, ()),
        ("mxfp8, 16 bits", {"mode": "mxfp8", "k": 128, **_BRAIN}, ()),
        ("nvfp4, 16 bits", {"mode": "nvfp4", "m": 8, "k": 128, **_HALF}, ()),
        ("nvfp8, 16 bits", {"mode": "nvfp8", "m": 40, "k": 128, **_HALF}, ()),
    )
)
_ARGUMENTS: tuple[Row[Any], ...] = (
    ("mxfp8, partial stage", MatmulSizes(mode="mxfp8", k=200, **_BRAIN), lambda k: {}, (), ()),
    ("nf4, partial stage", MatmulSizes(mode="nf4", k=72, n=160, **_HALF), lambda k: {}, (), ()),
    ("square, 16 bits", MatmulSizes(k=128, n=128, transpose=True, **_BRAIN), lambda k: {}, ("zeros", "transpose"), ()),
    (
        "precision, 16 bits",
        MatmulSizes(k=128, **_BRAIN),
        lambda k: {"precision": jax.lax.Precision.HIGHEST},
        ("zeros", "precision"),
        (),
    ),
)


def cases() -> dict[str, tuple[Case, ...]]:
    """The cases by operation."""
    return {"quantized_matmul": table(QuantizedMatmulArguments, inputs, (*_FORMATS, *_ARGUMENTS))}
