"""Other libraries' decoding over paged caches on a GPU, where they are installed."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from shared.turns import TimedCall

WORKSPACE = 128 << 20


def peers(cell: Any, arrays: tuple[jax.Array, ...]) -> Iterator[tuple[str, TimedCall]]:
    """Sides by name that decode a cell's batch, with PyTorch's tensors of the same memory."""
    plain = cell.rows == 1 and cell.layers == 1 and not (cell.decoding or cell.prefix or cell.tree)
    if not plain or cell.cache != "bfloat16" or importlib.util.find_spec("flashinfer") is None:
        return
    for tensor_cores in (False, True):
        name = f"FlashInfer, {'tensor cores' if tensor_cores else 'CUDA cores'}"
        try:
            yield name, _flashinfer(cell, arrays, tensor_cores)
        except Exception as error:  # noqa: BLE001 - whatever a peer says when it cannot do a call
            print(f"<!-- {name} leaves out {cell}: {(str(error).splitlines() or [''])[0][:150]} -->", flush=True)


def _flashinfer(cell: Any, arrays: tuple[jax.Array, ...], tensor_cores: bool) -> TimedCall:
    """Its wrapper, planned once for the lengths, as a server does for all layers of a step."""
    import flashinfer
    import torch

    jax.block_until_ready(arrays)
    query, keys, values = (torch.from_dlpack(x) for x in arrays[:3])
    lengths, tables = cell.lengths, np.asarray(arrays[4])
    counts = -(-lengths // cell.page)
    indices = np.concatenate([row[:count] for row, count in zip(tables, counts, strict=True)])
    ends = np.concatenate([[0], np.cumsum(counts)])
    last = (lengths - 1) % cell.page + 1
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
    # Ends of the sequences stay on the host, where the plan is made.
    host = [torch.from_numpy(x.astype(np.int32)) for x in (ends, indices, last)]
    given = host[0], host[1].cuda(), host[2]
    dtypes = {"q_data_type": query.dtype, "kv_data_type": keys.dtype}
    wrapper.plan(*given, cell.heads, cell.kv_heads, cell.size, cell.page, **dtypes)
    output = torch.empty_like(query)
    wrapper.run(query, (keys, values), out=output)  # compiles, or says that it cannot
    torch.cuda.synchronize()
    # A call from Python takes longer than a short batch: servers replay graphs, too.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(query, (keys, values), out=output)

    def run() -> Any:
        graph.replay()
        return output

    return run
