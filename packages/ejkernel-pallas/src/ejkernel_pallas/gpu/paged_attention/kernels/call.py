"""The shared memory and the constants of the paged kernel's two warpgroups."""

import dataclasses
from typing import Any

from ejkernel_pallas.gpu.paged_attention.spec import PagedSpec


@dataclasses.dataclass(frozen=True)
class SharedMemory:
    """Shared memory and mbarriers; n is a stage of the pipeline.

    Attributes:
        q: [64, D] queries of a tile.
        k: [n, 128, D] blocks of keys.
        v: [n, 128, Dv] their values.
        valid_key_bits: [n] int32, bit b: the page of keys 8 b to 8 b + 7 exists.
        q_full: Mbarrier: queries have arrived.
        q_free: Mbarrier: all reads of the queries are done.
        k_full: [n] mbarriers: keys and `valid_key_bits` have arrived.
        k_free: [n] mbarriers: all reads of the keys are done.
        v_full: [n] mbarriers: values have arrived.
        v_free: [n] mbarriers: all reads of the values are done.
        arrivals_before: [1] int32, a counter's value, or None.
        split_total: Accumulator of the splits that have been folded, in memory of the threads; None without splits.
    """

    q: Any
    k: Any
    v: Any
    valid_key_bits: Any
    q_full: Any
    q_free: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any
    split_total: Any = None
    arrivals_before: Any = None


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of a launch.

    Attributes:
        spec: Constants.
        operands: References by name: query, keys, values, tables, items, shares.
        outputs: References to output, lse, partial outputs and their lse.
        shared: Shared memory and barriers.
        arrivals: Counters of the splits that have been stored of each item and KV head, or None.
    """

    spec: PagedSpec
    operands: dict[str, Any]
    outputs: Any
    shared: SharedMemory
    arrivals: Any = None
