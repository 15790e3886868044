"""Arithmetic of shapes, inputs for trying things out, and small functions that code imports from `ejkernel.utils`.

What exists for launchers of Triton kernels alone is not here: dtype codes, block sizes and warps.
"""

import inspect
import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Int32

from ejkernel import arithmetic
from ejkernel.compat.sample_inputs import random_blocks, varlen_input_helper
from ejkernel.modules.operations.shared.shapes import as_count, as_float_dtype, got
from ejkernel.ops.device import current_device
from ejkernel.planning.precision import rounded
from ejkernel.renamed import accept_older_names

__all__ = [
    "assert_close",
    "cdiv",
    "generate_block_indices",
    "get_abs_err",
    "get_err_ratio",
    "get_gpu_arch",
    "get_sharding",
    "get_stride",
    "get_strides",
    "get_tpu_generation",
    "is_fp8",
    "is_hip",
    "make_dummy_rpa_inputs",
    "make_mesh",
    "narrow",
    "next_power_of_2",
    "numeric_gen",
    "random_dense",
    "strides_from_shape",
    "varlen_input_helper",
]


def cdiv(a: int, b: int) -> int:
    """Returns a divided by b, rounded up; a is an int or an integer array, b is not 0.

    Example:
        ```python
        from ejkernel.utils import cdiv

        assert cdiv(7, 2) == 4
        ```
    """
    return arithmetic.cdiv(a, b)


def next_power_of_2(x: int) -> int:
    """Returns the smallest power of two that is at least x; 1 for x below 1.

    Example:
        ```python
        from ejkernel.utils import next_power_of_2

        assert [next_power_of_2(n) for n in (0, 1, 5, 64)] == [1, 1, 8, 64]
        ```
    """
    return 1 << max(0, x - 1).bit_length()


def strides_from_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns how many elements lie between neighbours along each dimension of a contiguous row-major array.

    Example:
        ```python
        from ejkernel.utils import strides_from_shape

        assert strides_from_shape((2, 3, 4)) == (12, 4, 1)
        ```
    """
    return tuple(math.prod(shape[n + 1 :]) for n in range(len(shape)))


def numeric_gen(
    *shape: int,
    dtype: DTypeLike = jnp.float16,
    method: str = "normal",
    seed: int = 0,
    key: jax.Array | None = None,
) -> Array:
    """Returns random numbers from a sampler of `jax.random`.

    There is no hidden state: equal arguments give equal numbers, so each array wants a seed (or a key) of its own.

    Args:
        *shape: Sizes, or one tuple of them.
        dtype: Of the numbers.
        method: Name of a function of `jax.random` that needs a key, a shape and a dtype alone: `"normal"`,
            `"uniform"`, `"exponential"` and the like.
        seed: Of the key, where none is given.
        key: PRNG key.

    Raises:
        ValueError: There is no such sampler.

    Example:
        ```python
        from ejkernel.utils import numeric_gen

        query, key = (numeric_gen(2, 8, 4, 16, dtype="float32", seed=seed) for seed in (0, 1))
        assert (query == numeric_gen(2, 8, 4, 16, dtype="float32", seed=0)).all() and (query != key).any()
        ```
    """
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    sampler: Any = getattr(jax.random, method, None)
    parameters = inspect.signature(sampler).parameters if inspect.isfunction(sampler) else {}
    needed = [name for name, p in parameters.items() if p.default is p.empty]
    if needed not in (["key"], ["key", "shape"]) or not {"shape", "dtype"} <= parameters.keys():
        raise ValueError(f"method: got {method!r}, wants a sampler of jax.random that needs key, shape and dtype alone")
    source = jax.random.key(seed) if key is None else key
    return sampler(source, shape=sizes, dtype=jnp.dtype(dtype))


def random_dense(
    shape: Sequence[int], key: jax.Array, dtype: DTypeLike = jnp.float32, limit: float | None = None
) -> Array:
    """Returns uniform numbers that bfloat16 represents exactly, so that rounding and errors of a product can be told
    apart.

    Args:
        shape: Sizes.
        key: PRNG key.
        dtype: Floating dtype of the numbers.
        limit: They lie in [-limit, limit]; None means one divided by how many there are.

    Raises:
        ValueError: `dtype` is no floating dtype.
    """
    bound = 1 / max(1, math.prod(shape)) if limit is None else limit
    numbers = jax.random.uniform(key, tuple(shape), jnp.float32, -bound, bound)
    return rounded(numbers, jnp.bfloat16).astype(as_float_dtype("dtype", dtype))


def generate_block_indices(
    batch: int, num_query_blocks: int, heads: int, selected_blocks: int, block_size: int, seed: int = 42
) -> Int32[Array, "b t h s"]:
    """Returns random blocks for every **block** of queries, as block-sparse attention takes them.

    All queries of a block have the same: a random subset of the blocks up to their own, in ascending order, then -1
    where there are fewer than `selected_blocks`. `ejkernel.ejgpu` has a function of the same name that counts tokens.

    Args:
        batch: Rows.
        num_query_blocks: Blocks of queries, and of keys.
        heads: KV heads.
        selected_blocks: Slots per query.
        block_size: Tokens of a block.
        seed: Equal seeds give equal blocks.

    Returns:
        [batch, num_query_blocks * block_size, heads, selected_blocks] int32.

    Raises:
        ValueError: A size is no int of at least 1.

    Example:
        ```python
        from ejkernel.utils import generate_block_indices

        blocks = generate_block_indices(1, 4, 2, 3, block_size=16)
        assert blocks.shape == (1, 64, 2, 3)
        assert blocks[0, 0, 0].tolist() == [0, -1, -1]
        ```
    """
    size = as_count("block_size", block_size, minimum=1)
    available = jnp.arange(1, as_count("num_query_blocks", num_query_blocks, minimum=1) + 1)
    blocks = random_blocks(jax.random.key(seed), available, num_query_blocks, (batch, heads, selected_blocks))
    return jnp.repeat(jnp.where(blocks == num_query_blocks, -1, blocks), size, axis=1)


@accept_older_names(mesh_axis="axis_dims")
def make_mesh(
    axis_dims: Sequence[int] = (1, -1, 1, 1),
    axis_names: Sequence[str] = ("dp", "fsdp", "tp", "sp"),
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Returns a mesh of all devices.

    Args:
        axis_dims: Size of every axis; one of them may be -1, which is what the others leave over.
        axis_names: Their names.
        devices: None means `jax.devices()`.

    Raises:
        ValueError: The sizes do not multiply to the number of devices, or do not fit the names.

    Example:
        ```python
        import jax
        from ejkernel.utils import make_mesh

        mesh = make_mesh((1, 1, -1, 1))
        assert mesh.shape == {"dp": 1, "fsdp": 1, "tp": jax.device_count(), "sp": 1}
        ```
    """
    grid = np.asarray(jax.devices() if devices is None else devices, dtype=object).reshape(-1)
    if len(axis_dims) != len(axis_names):
        raise ValueError(f"axis_names: got {tuple(axis_names)}, wants a name for each of axis_dims {tuple(axis_dims)}")
    known = math.prod(size for size in axis_dims if size != -1)
    free = list(axis_dims).count(-1)
    fits = known > 0 and (grid.size % known == 0 if free == 1 else free == 0 and grid.size == known)
    if not fits:
        raise ValueError(
            f"axis_dims: got {tuple(axis_dims)}, wants sizes with the product {grid.size}, one of which may be -1"
        )
    return Mesh(grid.reshape(tuple(axis_dims)), tuple(axis_names))


def make_dummy_rpa_inputs(
    *,
    kv_lens: Sequence[int] = (37, 1, 0, 64),
    q_lens: Sequence[int] = (1, 1, 0, 20),
    num_q_heads: int = 8,
    num_kv_heads: int = 2,
    head_dim: int = 128,
    page_size: int = 16,
    dtype: DTypeLike = jnp.bfloat16,
    seed: int = 0,
) -> dict[str, Array]:
    """Returns arguments that `ragged_page_attention_v3` takes: a cache with all tokens but the new ones, and these.

    Args:
        kv_lens: Tokens of each sequence, the new ones included.
        q_lens: New tokens of each.
        num_q_heads: A multiple of `num_kv_heads`.
        num_kv_heads: KV heads.
        head_dim: Head size; the cache rounds it up to 128.
        page_size: Slots of a page.
        dtype: Of queries, new keys and values, and cache.
        seed: Equal seeds give equal inputs.

    Returns:
        The positional arguments by name, in order; the cache is in the `"interleaved"` layout. Every sequence has pages
        of its own, in random order, and there is one more that none uses; table entries that are not needed are 0.

    Raises:
        ValueError: A sequence has more new tokens than tokens, or heads or sizes do not fit.

    Example:
        ```python
        from ejkernel.modules import ragged_page_attention_v3
        from ejkernel.utils import make_dummy_rpa_inputs

        inputs = make_dummy_rpa_inputs(kv_lens=(20, 9), q_lens=(1, 9))
        output, cache = ragged_page_attention_v3(*inputs.values())
        assert output.shape == (10, 8, 128) and cache.shape == inputs["kv_cache"].shape
        ```
    """
    _check_lengths(kv_lens, q_lens, num_q_heads, num_kv_heads)
    kind = as_float_dtype("dtype", dtype)
    rows, pack = sum(q_lens), max(1, 4 // kind.itemsize)
    needed = [cdiv(n, as_count("page_size", page_size, minimum=1)) for n in kv_lens]
    order = iter(np.random.default_rng(seed).permutation(sum(needed) + 1))
    tables = np.zeros((len(kv_lens), max(1, *needed)), np.int32)
    for row, count in zip(tables, needed, strict=True):
        row[:count] = [next(order) for _ in range(count)]
    cache = (sum(needed) + 1, page_size, cdiv(2 * num_kv_heads, pack), pack, cdiv(head_dim, 128) * 128)
    new = (rows, num_kv_heads, head_dim)
    shapes = {"queries": (rows, num_q_heads, head_dim), "keys": new, "values": new, "kv_cache": cache}
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    decoding = next((n for n, length in enumerate(q_lens) if length != 1), len(q_lens))
    return {
        **{
            name: jax.random.normal(key, shape).astype(kind)
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        },
        "kv_lens": jnp.array(kv_lens, jnp.int32),
        "block_tables": jnp.array(tables.reshape(-1)),
        "query_start_loc": jnp.array(np.cumsum([0, *q_lens]), jnp.int32),
        "distribution": jnp.array([decoding, decoding, len(kv_lens)], jnp.int32),
    }


def _check_lengths(kv_lens: Sequence[int], q_lens: Sequence[int], num_q_heads: int, num_kv_heads: int) -> None:
    if not kv_lens or len(kv_lens) != len(q_lens):
        raise ValueError(f"q_lens: got {tuple(q_lens)}, wants one length for each of kv_lens {tuple(kv_lens)}")
    if not all(0 <= q <= kv for q, kv in zip(q_lens, kv_lens, strict=True)):
        raise ValueError(f"q_lens: got {tuple(q_lens)}, wants at most the kv_lens {tuple(kv_lens)}, and none negative")
    if num_q_heads % as_count("num_kv_heads", num_kv_heads, minimum=1):
        raise ValueError(f"num_q_heads: got {got(num_q_heads)}, wants a multiple of {num_kv_heads}")


def get_strides(shape: Any) -> tuple[int, ...]:
    """Returns elements between neighbours along each dimension of a contiguous array, or of an array's shape."""
    return strides_from_shape(getattr(shape, "shape", shape))


def get_stride(shape: Any, index: int = 0) -> int:
    """Returns elements between neighbours along one dimension."""
    return get_strides(shape)[index]


def get_sharding(arr: Any) -> Any:
    """Returns the sharding of an array; None where it does not say."""
    return getattr(arr, "sharding", None)


def narrow(x: jax.Array, dim: int, start: int, length: int) -> jax.Array:
    """Returns `length` elements of a dimension, from `start` on."""
    return jax.lax.dynamic_slice_in_dim(x, start, length, dim)


def get_abs_err(x: jax.Array, y: jax.Array) -> float:
    """Returns the largest difference."""
    return float(jnp.abs(x.astype(jnp.float32) - y.astype(jnp.float32)).max())


def get_err_ratio(x: jax.Array, y: jax.Array) -> float:
    """Returns root mean square of the difference divided by that of x."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return float(jnp.sqrt(jnp.mean(jnp.square(x - y))) / (jnp.sqrt(jnp.mean(jnp.square(x))) + 1e-8))


def assert_close(
    prefix: str, ref: jax.Array, tri: jax.Array, ratio: float, warning: bool = False, err_atol: float = 1e-6
) -> None:
    """Compares two arrays by the root mean square of their difference.

    Args:
        prefix: Begins the message.
        ref: What is right.
        tri: What is compared.
        ratio: Largest accepted error ratio.
        warning: Whether to warn instead of raising.
        err_atol: Largest absolute error that is always accepted.

    Raises:
        AssertionError: The arrays differ by more than `ratio`.
    """
    error, relative = get_abs_err(ref, tri), get_err_ratio(ref, tri)
    if error <= err_atol or relative < ratio:
        return
    message = f"{prefix}: error ratio {relative:.6f}, largest difference {error:.6f}, wants a ratio below {ratio}"
    if not warning:
        raise AssertionError(message)
    warnings.warn(message, stacklevel=2)


def is_fp8(x: Any) -> bool:
    """Returns whether an array has eight-bit floats."""
    return jnp.issubdtype(x.dtype, jnp.floating) and jnp.dtype(x.dtype).itemsize == 1


def is_hip() -> bool:
    """Returns whether the default device is an AMD GPU."""
    return current_device().vendor == "amd"


def get_gpu_arch() -> str:
    """Returns the kind of the default GPU; empty without one."""
    device = current_device()
    return device.kind if device.platform == "gpu" else ""


def get_tpu_generation() -> int | None:
    """Returns the number in the kind of the default TPU, 5 of `"TPU v5e"`; None without one."""
    device = current_device()
    digits = "".join(x for x in device.kind.lower().rpartition("v")[2] if x.isdigit())
    return int(digits) if device.platform == "tpu" and digits else None
