"""Latent token-sparse attention in Mosaic TPU: dense attention of neighbouring queries to the union of their lists.

The requirements and limits of the kernel are data in this module, so Pallas is not imported before a call.
"""

from collections.abc import Iterable

from ejkernel.families.token_sparse_attention import FAMILY, TokenSparseAttention
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.ops.chips import TPUS
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_pallas.tpu.requirements import make_mosaic_tpu_implementation, tpu_requires
from ejkernel_pallas.tpu.token_sparse_attention import HEAD_DIMS, memory_refusal_reasons
from ejkernel_pallas.tpu.token_sparse_attention_union import config

MIN_SCALE, MAX_SCALE = 1e-4, 1e4
"""The limits of the factor on the scores. What is added to them is divided by it before the product."""

HEADS = range(64, 129)
"""The query heads for which the order of choice is estimated."""
MIN_QUERIES, MIN_LISTED = 32, 512
"""The fewest queries, and listed keys, for which it is."""
MIN_KEYS_PER_ENTRY = 4
"""Keys per entry of a list, up to which whole tiles of keys take less time than the union of random lists."""
MAX_KEYS_PER_ENTRY = {"v5e": 16, "v5p": 64, "v6e": 32, "v7x": 64}
"""Keys per entry of a list, up to which the union of random lists takes less time than XLA's program, by chip.

The estimates are in docs/lab/tpu_kernels.md.
"""


def _priority(record: TokenSparseAttention, device: DeviceInfo, direction: Direction) -> int:
    """Returns the place in the order of choice: before XLA and `mosaic_tpu` for 64 to 128 bfloat16 heads where keys are
    more than 4, and at most 16 (v5e), 64 (v5p), 32 (v6e) or 64 (v7x) times the entries of a list.
    """
    return -5 if _reason_after_xla(record, device) else 15


def _priority_reason(record: TokenSparseAttention, device: DeviceInfo, direction: Direction) -> str:
    """Returns why the kernel has its place in the order of choice."""
    lists = f"lists of {record.indices.shape[3]} of {record.key.shape[1]} keys"
    return _reason_after_xla(record, device) or f"{lists} take less time in the union of neighbouring lists"


def _reason_after_xla(record: TokenSparseAttention, device: DeviceInfo) -> str:
    """Returns why the kernel comes after XLA's; empty if it comes first."""
    (_, tokens, heads, _), keys, listed = record.query.shape, record.key.shape[1], record.indices.shape[3]
    chip = next((name for name, chip in TPUS.items() if chip.kind == device.kind), "")
    most, lists = MAX_KEYS_PER_ENTRY.get(chip, 0), f"lists of {listed} of {keys} keys"
    is_estimated = record.query.dtype.name == "bfloat16" and heads in HEADS
    conditions = (
        (not most, f"no estimates for {device.kind}"),
        (not is_estimated, f"no estimates for {heads} heads of {record.query.dtype.name}"),
        (min(tokens / MIN_QUERIES, listed / MIN_LISTED) < 1, f"no estimates for {tokens} queries with {lists}"),
        (keys <= MIN_KEYS_PER_ENTRY * listed, f"{lists}: {MIN_KEYS_PER_ENTRY} keys per entry or less, left to others"),
        (keys > most * listed, f"{lists}: more than {most} keys per entry, left to XLA on {chip}"),
    )
    return next((sentence for applies, sentence in conditions if applies), "")


def _refusal_reasons(record: TokenSparseAttention) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    kv_heads, smallest = record.key.shape[2], config.SMALLEST_CONFIG
    if kv_heads > 1:
        yield f"key: got {kv_heads} heads, the kernel reads one"
    if not MIN_SCALE <= abs(record.softmax_scale) <= MAX_SCALE:
        yield f"softmax_scale: got {record.softmax_scale}, wants a magnitude from {MIN_SCALE} to {MAX_SCALE}"
    yield from memory_refusal_reasons(record, smallest.block_q, config.vmem_bytes(record, smallest))


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation of this family; its gradients are XLA's."""
    requires = tpu_requires(
        supported_fields={"softmax_aux"},
        refusal_reasons=_refusal_reasons,
        head_dims=HEAD_DIMS,
    )
    return (
        make_mosaic_tpu_implementation(
            FAMILY,
            ConfigSpace.of(config, forward=config.TpuTokenSparseUnion),
            requires,
            folder="token_sparse_attention_union",
            backward=False,
            name="mosaic_tpu_union",
            cases="ejkernel_pallas.tpu.token_sparse_attention_union.cases:cases",
            priority=_priority,
            priority_reason=_priority_reason,
        ),
    )
