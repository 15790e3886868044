"""The programs of every operation."""

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from ejkernel.ops.model import Op
from ejkernel.ops.plugins import registry
from ejkernel_conformance.random_calls import codes, dense, experts, losses, pages, recurrences
from ejkernel_conformance.random_calls.draws import Drawn, Rng, harmless

DRAWN: dict[str, Callable[[Rng], Drawn]] = {
    "all_gather_matmul": experts.all_gather_product,
    "attention": functools.partial(dense.flash, op="attention"),
    "blocksparse_attention": dense.blocksparse,
    "causal_conv1d": recurrences.convolution,
    "chunked_prefill_paged_decode": pages.chunked,
    "decode_attention": pages.decode,
    "deepseek_attn": dense.deepseek,
    "expert_routing": experts.routing,
    "flash_attention": dense.flash_or_packed,
    "flash_mla": dense.latent,
    "fused_cross_entropy": losses.cross_entropy,
    "fused_kl_divergence": losses.kl_divergence,
    "gated_delta_rule": recurrences.gated_delta,
    "gated_grouped_matmul": experts.gated_grouped,
    "gated_linear_attention": recurrences.gated,
    "gather_reduce": experts.gather,
    "grouped_matmul": experts.grouped,
    "gru": functools.partial(recurrences.network, gates=3),
    "kernel_delta_attention": recurrences.kernel_delta,
    "lightning_attention": recurrences.lightning,
    "lightning_indexer": dense.indexer,
    "lightning_indexer_dense_loss": dense.indexer_dense_loss,
    "lightning_indexer_loss": dense.indexer_loss,
    "lstm": functools.partial(recurrences.network, gates=4),
    "mean_pooling": experts.pooling,
    "mla_decode": dense.latent_decode,
    "multi_latent_ragged_page_attention": pages.latent,
    "multi_latent_ragged_page_attention_v2": pages.latent,
    "native_sparse_attention": dense.native_sparse,
    "page_attention": pages.page,
    "prefill_page_attention": pages.prefill,
    "quantized_matmul": experts.quantized,
    "ragged_decode_attention": pages.ragged_decode,
    "ragged_gated_delta_rule": recurrences.ragged_delta,
    "ragged_page_attention_v2": pages.version2,
    "ragged_page_attention_v2_turboquant": codes.version2,
    "ragged_page_attention_v3": pages.version3,
    "ragged_page_attention_v3_turboquant": codes.version3,
    "recurrent_attention": recurrences.recurrent,
    "reduce_scatter_matmul": experts.reduce_scatter_product,
    "ring_attention": functools.partial(dense.flash, op="ring_attention"),
    "rnn": functools.partial(recurrences.network, gates=1),
    "rwkv4": recurrences.rwkv4,
    "rwkv6": recurrences.rwkv6,
    "rwkv7": recurrences.rwkv7,
    "rwkv7_mul": recurrences.rwkv7_mul,
    "scaled_dot_product_attention": functools.partial(dense.flash, op="scaled_dot_product_attention"),
    "state_space_v1": recurrences.state_space_v1,
    "state_space_v2": recurrences.state_space_v2,
    "token_sparse_attention": dense.token_sparse,
    "unified_attention": pages.unified,
}


@dataclasses.dataclass(frozen=True)
class Program:
    """An operation with sizes, dtypes and options.

    Attributes:
        op: The operation.
        drawn: Its arguments.
        seed: What its values are drawn from.
        differentiated: Whether the gradients are computed as well.
    """

    op: Op
    drawn: Drawn
    seed: tuple[int, ...]
    differentiated: bool

    def arguments(self, number: int, poisoned: bool = True) -> Any:
        """Returns the argument record with one set of values."""
        rng = np.random.default_rng([*self.seed, number])
        with contextlib.nullcontext() if poisoned else harmless():
            return self.op.arguments(**self.drawn.values(rng), **self.drawn.options)


def make_program(name: str) -> Program:
    """Returns the program with a name `"seed:operation:number"`.

    Raises:
        ValueError: There is no such operation.
    """
    seed, op, number = name.split(":")
    found = registry().op(op)
    numbers = (int(seed), zlib.crc32(op.encode()), int(number))
    rng = np.random.default_rng(numbers)
    drawn = DRAWN[op](rng)
    return Program(found, drawn, numbers, bool(rng.random() < 0.5))
