"""Offsets of every Triton kernel at arrays of more than 2^31 elements, in Triton's interpreter.

Run with TRITON_INTERPRET=1. A call is traced with shapes alone; of each kernel that it would launch the last program,
whose offsets are the largest, runs on memory that is mapped and not there until it is touched. Triton's own check finds
every 32-bit addition, subtraction and product that overflows. Prints the kernels that ran for every case.
"""

import json
import math
import mmap
import sys

import jax
import jax.numpy as jnp
import numpy as np
import triton  # noqa: TID251 - a kernel that is wrong on purpose
import triton.language as tl  # noqa: TID251

from ejkernel import modules
from ejkernel.types import MaskInfo
from ejkernel_triton import _compat, interpreter, launch

HALF, INT = jnp.float16, jnp.int32
LIMIT = 2**31
NO_RESERVE = 0x4000  # of Linux; Python names it from 3.13 on


def shape(*sizes, dtype=HALF):
    return jax.ShapeDtypeStruct(sizes, dtype)


def mapped(like):
    """Zeros that take no memory until they are touched."""
    size = max(1, math.prod(like.shape))
    if size * like.dtype.itemsize < 2**24:
        return np.zeros(like.shape, like.dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = mmap.mmap(-1, size * like.dtype.itemsize, flags=flags)
    return np.frombuffer(memory, like.dtype, size).reshape(like.shape)


def run_last_program(call, values):
    """Runs the last program of a launch; `values` gives numbers for inputs by name."""
    names = call.kernel.arg_names
    arrays = [mapped(x) for x in (*call.inputs, *call.outputs)]
    for name, array in zip(names, arrays, strict=False):
        if name in values:
            array[...] = np.asarray(values[name](call, array.shape), array.dtype)
    tensors = [interpreter._TensorShim(x, str(x.dtype)) for x in arrays]
    _compat.patch_interpreter()
    builder = _compat._interpreter_module().interpreter_builder
    place, options, dims = builder.set_grid_idx, builder.options, builder.set_grid_dim
    last = call.grid - 1
    builder.set_grid_idx = lambda x, y, z: place(last, y, z)
    builder.set_grid_dim = lambda x, y, z: dims(call.grid, y, z)
    builder.options = type(options)(debug=True)
    try:
        with np.errstate(all="ignore"):
            call.kernel[(1,)](*tensors, **call.constants)
    finally:
        builder.set_grid_idx, builder.set_grid_dim, builder.options = place, dims, options


def launches_of(function, *shapes):
    with launch.collect_launches() as launches:
        jax.eval_shape(lambda *arrays: function(*arrays), *shapes)
    return launches


def gradients(function, count):
    """Value and gradients by the first arguments."""

    def loss(*arrays):
        return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(function(*arrays)))

    return jax.value_and_grad(loss, argnums=tuple(range(count)))


def last_block(call, sizes):
    """Runs of blocks of which the last one of all is visited, and masked; of T tokens on the other side."""
    own = sizes[1]
    other = [name for name in ("BLOCK_Q", "BLOCK_KV") if -(-T // call.constants[name]) != own]
    blocks = -(-T // call.constants[other[0] if other else "BLOCK_KV"])
    return np.broadcast_to([blocks - 1, blocks - 1, blocks - 1, blocks], sizes)


def flash(query, key, value, *rest):
    return modules.flash_attention(query, key, value, *rest, causal=True, platform="triton")


T, H, D = 2**16 + 5, 256, 128
SEQUENCES = shape(1, T, H, D)
ROWS = shape(2, T, H, D)  # a batch row alone is beyond 2^31
F32 = jnp.float32
GROUPED = (ROWS, *(shape(2, T, 16, D),) * 2)


def biased(query, key, value, bias):
    return modules.flash_attention(query, key, value, bias, sliding_window=(63, 0), platform="triton")


def masked(query, key, value, mask):
    info = MaskInfo(_attention_mask=mask)
    return modules.flash_attention(query, key, value, mask_info=info, normalize_output=False, platform="triton")


def sparse(query, key, value, indices):
    return modules.native_sparse_attention(query, key, value, block_indices=indices, block_size=64, platform="triton")


def token_sparse(query, key, value, indices):
    return modules.token_sparse_attention(query, key, value, indices, platform="triton")


def indexer(query, key, weights):
    return modules.lightning_indexer(query, key, weights, top_k=4, platform="triton")[0]


def gla(query, key, value, gate):
    return modules.gla_attention(query, key, value, gate, platform="triton")


def delta(query, key, value, beta, decay):
    return modules.gated_delta_rule(query, key, value, beta, decay, platform="triton")


def kda(query, key, value, beta, decay):
    return modules.kernel_delta_attention(query, key, value, beta, decay, platform="triton")


def chunk_means(x):
    return modules.mean_pooling(x, chunk_size=32, platform="triton")


def sequence_means(x, cu_seqlens):
    return modules.mean_pooling(x, cu_seqlens, platform="triton")


def lightning(query, key, value):
    return modules.lightning_attention(query, key, value, layer_idx=0, num_layers=2, platform="triton")


def scan(x, decay, inputs, outputs, skip, dt):
    return modules.state_space_v1(x, decay, inputs, outputs, skip, dt, platform="triton")[0]


def convolution(x, weight, bias):
    return modules.causal_conv1d(x, weight, bias, activation="silu", platform="triton")


def experts(lhs, rhs, sizes):
    return modules.grouped_matmul(lhs, rhs, sizes, platform="triton")


CHANNELS = shape(2, 259, 2**23)
MANY_HEADS = shape(2, 2051, 8192, D)  # few chunks, as kernels walk over them
SEGMENT = {"block_lists": last_block}
PAGES = shape(2**15 + 64, 64, 8, D)


def unified(queries, keys, values, lengths, tables, starts):
    return modules.unified_attention(queries, keys, values, lengths, tables, starts, platform="triton")


def last_entry(call, sizes):
    """A plan whose only entry is the last row of the last sequence, with the keys at the end of its table."""
    spec = call.constants["spec"]
    length = spec.PAGES_PER_SEQUENCE * 64
    work = np.zeros(sizes, np.int32)
    last = (
        spec.NUM_SEQUENCES - 1,
        spec.NUM_QUERY_ROWS - 1,
        1,
        length - 1,
        length - 1,
        length - spec.BLOCK_KV,
        length,
        0,
        1,
    )
    work[:, 0] = last
    return work


def last_share(call, sizes):
    """The last program has the last head of that entry."""
    shares = np.zeros(sizes, np.int32)
    heads = call.constants["spec"].HK
    shares[:, -2], shares[:, -1] = (0, heads - 1), (1, heads)
    return shares


LAST = {
    "work_list": last_entry,
    "program_shares": last_share,
    "block_tables": lambda call, sizes: np.full(sizes, PAGES.shape[0] - 1),
}
LAST_KEYS = {
    "key_starts": lambda call, sizes: np.full(sizes, T - 40),
    "key_ends": lambda call, sizes: np.full(sizes, T),
    "first_query": lambda call, sizes: np.full(sizes, T - call.constants["spec"].CHUNK),
    "counts": lambda call, sizes: np.full(sizes, 4),
}
CASES = {
    "unified_attention": (
        unified,
        (shape(9, 32, D), PAGES, PAGES, shape(4, dtype=INT), shape(4, 16, dtype=INT), shape(5, dtype=INT)),
        LAST,
    ),
    "flash_attention": (gradients(flash, 3), (SEQUENCES,) * 3, SEGMENT),
    "flash_attention, batch": (gradients(flash, 3), (ROWS,) * 3, {}),
    "bias": (gradients(biased, 4), (shape(1, T, 1, 64),) * 3 + (shape(1, 1, T, T),), SEGMENT),
    "mask": (gradients(masked, 3), (shape(1, T, 1, 64),) * 3 + (shape(1, 1, T, T, dtype=jnp.bool_),), SEGMENT),
    "native_sparse_attention": (gradients(sparse, 3), (*GROUPED, shape(2, T, 16, 4, dtype=INT)), {}),
    "token_sparse_attention": (gradients(token_sparse, 3), (*GROUPED, shape(2, T, 2, dtype=INT)), {}),
    "lightning_indexer": (indexer, (ROWS, shape(2, T, D), shape(2, T, H)), LAST_KEYS),
    "gla_attention": (gradients(gla, 4), (MANY_HEADS,) * 4, {}),
    "lightning_attention": (gradients(lightning, 3), (MANY_HEADS,) * 3, {}),
    "gated_delta_rule": (delta, (MANY_HEADS,) * 3 + (shape(*MANY_HEADS.shape[:3]),) * 2, {}),
    "kernel_delta_attention": (kda, (MANY_HEADS,) * 3 + (shape(*MANY_HEADS.shape[:3]), MANY_HEADS), {}),
    "mean_pooling": (gradients(chunk_means, 1), (MANY_HEADS,), {}),
    "mean_pooling, packed": (gradients(sequence_means, 1), (shape(T * H, D), shape(3, dtype=INT)), {}),
    "state_space_v1": (
        gradients(scan, 6),
        (
            CHANNELS,
            shape(2**23, 16, dtype=F32),
            shape(*CHANNELS.shape[:2], 16),
            shape(*CHANNELS.shape[:2], 16),
            shape(2**23, dtype=F32),
            CHANNELS,
        ),
        {},
    ),
    "causal_conv1d": (gradients(convolution, 3), (CHANNELS, shape(2**23, 4), shape(2**23)), {}),
    "grouped_matmul": (
        gradients(experts, 2),
        (shape(2**19 + 3, 4096), shape(130, 4096, 4096), shape(130, dtype=INT)),
        {},
    ),
}


@triton.jit
def overflowing_kernel(array, output, STRIDE: tl.constexpr):
    """Whose offset the check has to find."""
    tl.store(output, tl.load(array + tl.program_id(0) * STRIDE))


def overflow():
    """The check on a kernel that is wrong."""
    one, shared = shape(1), {"num_warps": 1, "num_stages": 1}
    constants = {"STRIDE": 2**30}
    run_last_program(
        launch.Launch(kernel=overflowing_kernel, inputs=(one,), outputs=(one,), grid=3, constants=constants, **shared),
        {},
    )


def main(names):
    if names == ["an overflow"]:
        overflow()
    found = {}
    for name in names or CASES:
        function, shapes, values = CASES[name]
        ran = []
        for call in launches_of(function, *shapes):
            sizes = [math.prod(x.shape) for x in (*call.inputs, *call.outputs)]
            run_last_program(call, values)
            ran.append((call.kernel.fn.__name__, max(sizes) > LIMIT))
        found[name] = ran
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
