"""Errors of the kernels that add in the matrix's order, interpreted, relative to the norm of the outputs."""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.quantized_matmul import QuantizedMatmul, reference
from ejkernel.planning.quantized_formats import make_format
from ejkernel.quantization import quantize
from ejkernel_triton.quantized_matmul.ordered.config import OrderedTiles
from ejkernel_triton.quantized_matmul.ordered.forward import forward

K, N = 192, 128
CALLS = (
    ("affine", 4, 64, False, 5, "float32"),
    ("affine", 4, 64, True, 70, "float32"),
    ("affine", 4, 64, False, 70, "bfloat16"),
    ("affine", 8, 64, False, 5, "float32"),
    ("nf4", 4, 64, True, 5, "float32"),
    ("mxfp4", 4, 32, False, 5, "float32"),
    ("nvfp8", 8, 16, True, 5, "float32"),
)
TILES = {"block_m": 16, "block_r": 32, "num_warps": 4, "num_stages": 1}


def make(mode, bits, group_size, transpose, rows, dtype):
    """The record of a call."""
    weights = jax.random.normal(jax.random.key(1), (N, K) if transpose else (K, N), jnp.float32)
    packed, scales, *others = quantize(weights, mode=mode, bits=bits, group_size=group_size, axis="col")
    return QuantizedMatmul(
        x=jax.random.normal(jax.random.key(0), (rows, K), jnp.float32).astype(dtype),
        packed=packed,
        scales=scales,
        zeros=others[0] if mode == "affine" else None,
        tensor_scale=others[0] if mode.startswith("nv") else None,
        format=make_format(mode, bits, group_size),
        transpose=transpose,
    )


for call in CALLS:
    record = make(*call)
    expected = np.asarray(reference(record)[0], np.float32)
    for dequantize_first, words in ((False, 4), (True, 8)):
        tiles = OrderedTiles(**TILES, block_w=words, dequantize_first=dequantize_first)
        output = np.asarray(jax.jit(lambda record, tiles=tiles: forward(record, tiles)[0])(record), np.float32)
        error = np.linalg.norm(output - expected) / np.linalg.norm(expected)
        print(*call, dequantize_first, error < (5e-3 if call[-1] == "bfloat16" else 1e-6), f"{error:.1e}")
