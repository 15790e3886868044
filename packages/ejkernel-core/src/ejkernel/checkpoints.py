"""Weights of quantised checkpoints as arguments of `quantized_matmul` and `grouped_matmul`.

Each function takes the tensors of one layer as a checkpoint stores them, and returns keyword arguments: those of
`quantized_matmul` for one matrix, those of `grouped_matmul` for a stack of experts. Codes are not rounded again.

    quantized_matmul(x, **from_gptq(qweight, qzeros, scales))
    grouped_matmul(rows, group_sizes=sizes, **from_mxfp4(blocks, scales))
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel import _compat
from ejkernel.arithmetic import cdiv
from ejkernel.planning.quantized_formats import WORD_BITS, pack, unpack
from ejkernel.promotion import with_standard_promotion

AWQ_NIBBLE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Column n of the eight columns of a word is in nibble `AWQ_NIBBLE_ORDER[n]` of the word."""

MatmulArguments = dict[str, Any]


@with_standard_promotion
def from_gptq(
    qweight: jax.Array,
    qzeros: jax.Array,
    scales: jax.Array,
    g_idx: jax.Array | None = None,
    *,
    bits: int = 4,
    checkpoint_format: Literal["gptq", "gptq_v2"] = "gptq",
) -> MatmulArguments:
    """Returns arguments for a layer of GPTQ (Frantar et al. 2022, arXiv:2210.17323).

    Args:
        qweight: int32 [..., K * bits / 32, N].
        qzeros: int32 [..., K / group, N * bits / 32]. "gptq" stores zeros less 1, "gptq_v2" the zeros themselves.
        scales: [..., K / group, N] float16, bfloat16 or float32.
        g_idx: [K], the group of each row, checked to be in order; None for groups in order.
        bits: 2, 3, 4 or 8.
        checkpoint_format: `quantize_config.json` names it.

    Raises:
        ValueError: Shapes do not fit together, or groups are not in order.
    """
    if bits not in (2, 3, 4, 8):
        raise ValueError(f"bits: got {bits!r}, wants 2, 3, 4 or 8")
    if checkpoint_format not in ("gptq", "gptq_v2"):
        raise ValueError(f"checkpoint_format: got {checkpoint_format!r}, wants 'gptq' or 'gptq_v2'")
    words = jnp.swapaxes(_uint32_words_from_int32("qweight", qweight), -1, -2)
    columns, group = _columns_and_group_size("scales", scales.shape[-2], words.shape[-1] * WORD_BITS // bits)
    _check_groups_in_order(g_idx, columns, group)
    expected = (*scales.shape[:-1], cdiv(scales.shape[-1] * bits, WORD_BITS))
    _check_zeros(qzeros, expected, scales)
    zeros = unpack(_uint32_words_from_int32("qzeros", qzeros), bits, scales.shape[-1])
    if checkpoint_format == "gptq":
        zeros = (zeros + 1) & (2**bits - 1)
    stored = {"scales": jnp.swapaxes(scales, -1, -2), "zeros": jnp.swapaxes(zeros, -1, -2).astype(scales.dtype)}
    return _matmul_arguments(words, stored, mode="affine", bits=bits, group_size=group)


@with_standard_promotion
def from_awq(qweight: jax.Array, qzeros: jax.Array, scales: jax.Array) -> MatmulArguments:
    """Returns arguments for a layer of AWQ's GEMM version, 4 bits (Lin et al. 2023, arXiv:2306.00978).

    Args:
        qweight: int32 [..., K, N / 8]; columns of a word are in the order 0, 2, 4, 6, 1, 3, 5, 7.
        qzeros: int32 [..., K / group, N / 8] in the same order.
        scales: [..., K / group, N] float16, bfloat16 or float32.

    Raises:
        ValueError: Shapes do not fit together.
    """
    _, group = _columns_and_group_size("scales", scales.shape[-2], qweight.shape[-2])
    _check_zeros(qzeros, (*scales.shape[:-1], qweight.shape[-1]), scales)
    codes = jnp.swapaxes(_unpack_awq_codes("qweight", qweight), -1, -2)
    zeros = jnp.swapaxes(_unpack_awq_codes("qzeros", qzeros), -1, -2).astype(scales.dtype)
    stored = {"scales": jnp.swapaxes(scales, -1, -2), "zeros": zeros}
    return _matmul_arguments(pack(codes, 4), stored, mode="affine", bits=4, group_size=group)


@with_standard_promotion
def from_compressed_tensors(tensors: Mapping[str, jax.Array], *, bits: int = 4) -> MatmulArguments:
    """Returns arguments for a layer in a format of compressed-tensors, which the names of its tensors tell.

    Args:
        tensors: The layer's tensors by name: `weight_packed` int32 [N, K * bits / 32] with `weight_scale` and, of
            asymmetric weights, `weight_zero_point` (pack-quantized); `weight_packed` uint8 [N, K / 2] with
            `weight_scale` and `weight_global_scale` (nvfp4) or with scales alone (mxfp4); `weight` of int8 or
            float8_e4m3fn with `weight_scale`. Scales are [N, K / group], [N, 1], [N], [1] or, of float8, of blocks of
            128; of experts [E, N, K / group], [E, N] or [E]. Other names are not read.
        bits: Of integers, as `quantization_config` says.

    Raises:
        ValueError: Tensors are missing or do not fit together.
    """
    scale = _required_tensor(tensors, "weight_scale")
    weight = tensors.get("weight_packed", tensors.get("weight"))
    if weight is None:
        raise ValueError(f"tensors: got {sorted(tensors)}, wants weight_packed or weight")
    if weight.dtype == jnp.uint8 and "weight_global_scale" in tensors:
        return from_nvfp4(weight, scale, 1 / tensors["weight_global_scale"].astype(jnp.float32))
    if weight.dtype == jnp.uint8:
        return from_mxfp4(weight, scale)
    if weight.dtype == jnp.float8_e4m3fn:
        return _from_fp8(weight, scale)
    _check_groups_in_order(tensors.get("weight_g_idx"), None, None)
    if weight.dtype == jnp.int8:
        codes = lax.bitcast_convert_type(weight, jnp.uint8) ^ 128
        words, bits = pack(codes, 8), 8
    elif bits in (2, 4, 8):
        words = _uint32_words_from_int32("weight_packed", weight)
    else:
        raise ValueError(f"bits: got {bits!r}, wants 2, 4 or 8, of which a word holds a whole number")
    columns = words.shape[-1] * WORD_BITS // bits
    scale = _with_axes_of_weights("weight_scale", scale, (*words.shape[:-1], columns))
    scale = jnp.broadcast_to(scale, (*words.shape[:-1], scale.shape[-1]))
    _, group = _columns_and_group_size("weight_scale", scale.shape[-1], columns)
    zero = tensors.get("weight_zero_point")
    if zero is None:
        return _matmul_arguments(words, {"scales": scale}, mode="symmetric", bits=bits, group_size=group)
    zeros = _unsigned_zero_points(zero, bits, (*words.shape[:-1], columns))
    stored = {"scales": scale, "zeros": jnp.broadcast_to(zeros, scale.shape).astype(scale.dtype)}
    return _matmul_arguments(words, stored, mode="affine", bits=bits, group_size=group)


@with_standard_promotion
def from_mxfp4(blocks: jax.Array, scales: jax.Array) -> MatmulArguments:
    """Returns arguments for weights in mxfp4, as GPT-OSS and OCP's specification have them.

    Args:
        blocks: uint8 [..., N, K / 32, 16], or [..., N, K / 2]: two codes in a byte, the first in its low half.
        scales: [..., N, K / 32] of e8m0, uint8 or float8_e8m0fnu.

    Raises:
        ValueError: Shapes do not fit together.
    """
    rows = blocks.shape[: max(scales.ndim - 1, 1)]
    _check_scales_of_rows("scales", scales, rows, "K / 32")
    if blocks.ndim == scales.ndim + 1:
        blocks = blocks.reshape(*rows, -1)
    words = _uint32_words_from_bytes("blocks", blocks)
    _, group = _columns_and_group_size("scales", scales.shape[-1], words.shape[-1] * 8)
    return _matmul_arguments(words, {"scales": scales}, mode="mxfp4", bits=4, group_size=group)


@with_standard_promotion
def from_nvfp4(weight: jax.Array, weight_scale: jax.Array, weight_scale_2: jax.Array | None = None) -> MatmulArguments:
    """Returns arguments for weights in nvfp4, as ModelOpt stores them; compressed-tensors stores 1 / weight_scale_2.

    Args:
        weight: uint8 [..., N, K / 2]: two codes in a byte, the first in its low half.
        weight_scale: [..., N, K / 16] float8_e4m3fn, or its bits in uint8, in order and not swizzled.
        weight_scale_2: The tensor scale, float32 of one element per matrix; None for 1.

    Raises:
        ValueError: Shapes do not fit together.
    """
    words = _uint32_words_from_bytes("weight", weight)
    _check_scales_of_rows("weight_scale", weight_scale, words.shape[:-1], "K / 16")
    _, group = _columns_and_group_size("weight_scale", weight_scale.shape[-1], words.shape[-1] * 8)
    stored = {"scales": weight_scale}
    if weight_scale_2 is not None:
        # One element, or one for each expert.
        shape = words.shape[:-2] if weight_scale_2.size > 1 else ()
        if weight_scale_2.size not in (1, math.prod(words.shape[:-2])):
            wants = f"one element, or [{', '.join(map(str, words.shape[:-2]))}]" if words.ndim > 2 else "one element"
            raise ValueError(f"weight_scale_2: got shape {tuple(weight_scale_2.shape)}, wants {wants}")
        stored["tensor_scale"] = jnp.broadcast_to(weight_scale_2.astype(jnp.float32).reshape(shape), words.shape[:-2])
    return _matmul_arguments(words, stored, mode="nvfp4", bits=4, group_size=group)


@with_standard_promotion
def from_fp8_blocks(
    weight: jax.Array, weight_scale_inv: jax.Array, *, block: tuple[int, int] = (128, 128)
) -> MatmulArguments:
    """Returns arguments for weights of float8_e4m3fn with a scale for each block, as DeepSeek V3 and Qwen3 store them.

    Experts keep their dtype: `grouped_matmul` takes matrices of 8 bits and scales of blocks as they are.

    Args:
        weight: [..., N, K] float8_e4m3fn.
        weight_scale_inv: [..., ceil(N / block[0]), ceil(K / block[1])] floating, factors on the blocks.
        block: Rows and columns of a block. Columns divide K.

    Raises:
        ValueError: Shapes do not fit together.
    """
    rows, columns = weight.shape[-2:]
    wants = (cdiv(rows, block[0]), cdiv(columns, block[1]))
    if weight.dtype != jnp.float8_e4m3fn or columns % block[1]:
        raise ValueError(
            f"weight: got {weight.dtype}{list(weight.shape)}, wants float8_e4m3fn with K % {block[1]} == 0"
        )
    if weight_scale_inv.shape != (*weight.shape[:-2], *wants):
        raise ValueError(
            f"weight_scale_inv: got shape {tuple(weight_scale_inv.shape)}, wants [..., {wants[0]}, {wants[1]}]"
        )
    return _from_fp8(weight, jnp.repeat(weight_scale_inv, block[0], axis=-2)[..., :rows, :])


def _from_fp8(weight: jax.Array, scale: jax.Array) -> MatmulArguments:
    """Returns arguments for [..., N, K] of float8_e4m3fn with scales that broadcast to [..., N, K / group]."""
    if scale.ndim == weight.ndim and scale.shape[-2] not in (1, weight.shape[-2]):
        return from_fp8_blocks(weight, scale)
    scale = _with_axes_of_weights("weight_scale", scale, weight.shape)
    scale = jnp.broadcast_to(scale, (*weight.shape[:-1], scale.shape[-1]))
    if weight.ndim == 3:
        return {"rhs": weight, "rhs_scale": jnp.swapaxes(scale, 1, 2)[:, :, None], "transpose_rhs": True}
    _, group = _columns_and_group_size("weight_scale", scale.shape[-1], weight.shape[-1])
    words = _uint32_words_from_bytes("weight", lax.bitcast_convert_type(weight, jnp.uint8))
    return _matmul_arguments(words, {"scales": scale}, mode="fp8", bits=8, group_size=group)


def _matmul_arguments(
    words: jax.Array, scales_and_zeros: dict[str, jax.Array], **weight_format: Any
) -> MatmulArguments:
    """Returns arguments of `quantized_matmul` for [N, words], of `grouped_matmul` for [E, N, words]."""
    if words.ndim == 2:
        return {"w": words, **scales_and_zeros, **weight_format, "transpose": True}
    if words.ndim != 3:
        raise ValueError(f"weights: got {words.ndim} dimensions, wants 2, or 3 of experts")
    named = {
        "rhs_scale": scales_and_zeros["scales"],
        "rhs_zeros": scales_and_zeros.get("zeros"),
        "rhs_tensor_scale": scales_and_zeros.get("tensor_scale"),
    }
    return {
        "rhs": words,
        **named,
        **{f"rhs_{name}": value for name, value in weight_format.items()},
        "transpose_rhs": True,
    }


def _uint32_words_from_int32(name: str, packed: jax.Array) -> jax.Array:
    """Returns words as uint32."""
    if packed.dtype not in (jnp.int32, jnp.uint32):
        raise ValueError(f"{name}: got dtype {packed.dtype}, wants int32")
    return lax.bitcast_convert_type(packed, jnp.uint32)


def _uint32_words_from_bytes(name: str, packed: jax.Array) -> jax.Array:
    """Returns words uint32 of bytes, the first byte lowest."""
    if packed.dtype != jnp.uint8 or packed.shape[-1] % 4:
        raise ValueError(f"{name}: got {packed.dtype}{list(packed.shape)}, wants uint8 rows in multiples of 4 bytes")
    return lax.bitcast_convert_type(packed.reshape(*packed.shape[:-1], -1, 4), jnp.uint32)


def _check_zeros(zeros: jax.Array, expected: tuple[int, ...], scales: jax.Array) -> None:
    """Raises ValueError unless there are packed zeros for each group of each column, as there are scales."""
    if zeros.shape != expected:
        raise ValueError(
            f"qzeros: got shape {tuple(zeros.shape)}, wants {expected} for scales of shape {tuple(scales.shape)}"
        )


def _unpack_awq_codes(name: str, packed: jax.Array) -> jax.Array:
    """Returns codes of 4 bits, in the order of columns."""
    words = _uint32_words_from_int32(name, packed)
    nibbles = unpack(words, 4, words.shape[-1] * 8).reshape(*words.shape, 8)
    return nibbles[..., jnp.array(AWQ_NIBBLE_ORDER)].reshape(*words.shape[:-1], -1)


def _check_scales_of_rows(name: str, scales: jax.Array, rows: tuple[int, ...], groups: str) -> None:
    """Raises ValueError unless scales have the leading axes of their weights, [..., N]."""
    if scales.shape[:-1] != rows:
        wants = ", ".join([*map(str, rows), groups])
        raise ValueError(f"{name}: got shape {tuple(scales.shape)}, wants [{wants}] for the rows of the weights")


def _with_axes_of_weights(name: str, scales: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns scales with as many axes as weights [..., N, K]: one for all, one per expert, one per row, or groups.

    Raises:
        ValueError: The scales are of other rows.
    """
    if scales.size == 1:
        return scales.reshape((1,) * len(shape))
    leading = shape[: min(scales.ndim, len(shape) - 1)]
    if scales.ndim > len(shape) or any(x not in (1, n) for x, n in zip(scales.shape, leading, strict=False)):
        wants = ", ".join(map(str, shape[:-1]))
        raise ValueError(
            f"{name}: got shape {tuple(scales.shape)}, wants [{wants}, groups] for the rows of the weights"
        )
    return scales.reshape(*scales.shape, *((1,) * (len(shape) - scales.ndim)))


def _columns_and_group_size(name: str, groups: int, columns: int) -> tuple[int, int]:
    """Returns the columns of a row and the columns of a group; -1 if a group is the whole row."""
    if not groups or columns % groups:
        raise ValueError(f"{name}: got {groups} groups, wants a divisor of the {columns} input features")
    return columns, -1 if groups == 1 else columns // groups


def _check_groups_in_order(g_idx: Any, columns: int | None, group_size: int | None) -> None:
    """Refuses groups that are not in order, where the indices can be read."""
    if g_idx is None or _compat.is_tracer(g_idx):
        return
    group_size = columns if group_size == -1 else group_size
    if columns is None or group_size is None or not bool((g_idx == jnp.arange(columns) // group_size).all()):
        raise ValueError(
            "g_idx: got groups out of order, wants a layer quantised without desc_act, or with its rows sorted "
            "and the columns of x in the same order"
        )


def _unsigned_zero_points(zero_point: jax.Array, bits: int, shape: tuple[int, ...]) -> jax.Array:
    """Returns zeros [..., N, groups] of unsigned codes: packed along N in int32, or signed integers."""
    rows = shape[-2]
    if zero_point.dtype == jnp.int32 and zero_point.ndim == len(shape) and zero_point.shape[-2] != rows:
        columns_first = unpack(
            jnp.swapaxes(_uint32_words_from_int32("weight_zero_point", zero_point), -1, -2), bits, rows
        )
        return jnp.swapaxes(columns_first, -1, -2)
    return _with_axes_of_weights("weight_zero_point", zero_point, shape).astype(jnp.int32) + 2 ** (bits - 1)


def _required_tensor(tensors: Mapping[str, jax.Array], name: str) -> jax.Array:
    if name not in tensors:
        raise ValueError(f"tensors: got {sorted(tensors)}, wants {name}")
    return tensors[name]
