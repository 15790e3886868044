"""Token-sparse attention of up to 16 heads a KV head in CUDA C++ for Hopper: neighbouring queries share reads."""

from collections.abc import Iterable
from typing import Any

from ejkernel.arithmetic import cdiv
from ejkernel.ops import Implementation
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import DeviceInfo, current_device
from ejkernel.ops.params import Direction
from ejkernel_cuda.grouped_sparse_attention.forward import MAX_HEADS, MAX_KEYS, QUERIES, SIZE
from ejkernel_cuda.requirements import cuda_requires

HOPPER_COMPUTE_CAPABILITY = 9.0
"""The compute capability whose instructions the kernel consists of; no later chip has them."""


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if record.value is None:
        yield "value: got None, the kernel reads values of their own"
    columns, values = record.query.shape[3], record.value_size
    if (columns, values) != (SIZE, SIZE):
        yield f"keys have {columns} columns and values {values}; the kernel wants {SIZE} and {SIZE}"
    keys, kv_heads = record.key.shape[1:3]
    heads = record.query.shape[2]
    if heads > MAX_HEADS * kv_heads:
        yield f"the queries have {heads} heads; the kernel wants at most {MAX_HEADS} for each of {kv_heads} KV heads"
    if keys > MAX_KEYS:
        yield f"key: got {keys} keys, the kernel reads at most {MAX_KEYS}"
    capability = current_device().compute_capability
    if capability is not None and int(capability) != int(HOPPER_COMPUTE_CAPABILITY):
        yield f"compute capability {capability}: the kernel is compiled for {HOPPER_COMPUTE_CAPABILITY} alone"


def _priority(record: Any, device: DeviceInfo, direction: Direction) -> int:
    """Returns a priority above Triton's 10 if groups of queries fill the chip, and heads their rows.

    Nothing here depends on the lists, which are values: this kernel takes half of Triton's time where neighbours list
    mostly the same keys, as models' selections do, and 1.2 times its time where lists have nothing in common.
    """
    (batch, tokens, heads, _), kv_heads = record.query.shape, record.key.shape[2]
    fills_chip = batch * kv_heads * cdiv(tokens, QUERIES) >= gpu_of(device).multiprocessors
    fills_rows = tokens >= QUERIES and heads // kv_heads > MAX_HEADS // 2
    return 20 if fills_chip and fills_rows else -1


IMPLEMENTATIONS = (
    Implementation(
        family="token_sparse_attention",
        name="cuda_grouped",
        platform="cuda",
        forward="ejkernel_cuda.grouped_sparse_attention.forward:forward",
        requires=cuda_requires(
            HOPPER_COMPUTE_CAPABILITY, {"bfloat16"}, handles={"value", "softmax_aux"}, extra_reasons=_refusal_reasons
        ),
        priority=_priority,
        cases="ejkernel_cuda.grouped_sparse_attention.cases:cases",
    ),
)
