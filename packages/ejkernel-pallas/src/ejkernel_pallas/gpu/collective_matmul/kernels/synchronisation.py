"""Counters by which a device signals what it has written to another device's memory."""

from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import llvm


def remote_device(axis_name: str | None, device: Any) -> Any:
    """Returns the id of a device of a mesh axis, as remote references and counters take it."""
    return {axis_name: device}


def announce_copies(arrivals: Any, device: Any) -> None:
    """Increments a counter of another device once the warpgroup's copies to it have been written."""
    # Waits for the writes, not only the reads, in the thread that started the copies; it also increments the counter.
    plgpu.wait_smem_to_gmem(0)
    pl.semaphore_signal(arrivals, device_id=device)


def announce_stores(arrivals: Any, device: Any) -> None:
    """Increments a counter of another device after the stores of all threads of the warpgroup."""

    @plgpu.inline_mgpu()
    def wait_for_warpgroup(_: Any) -> None:
        # One thread increments the counter with release semantics, which cover the stores before the barrier.
        mgpu.utils.warpgroup_barrier()

    wait_for_warpgroup()  # pyright: ignore[reportCallIssue]  # the decorator gives the context
    pl.semaphore_signal(arrivals, device_id=device)


def wait_for_stores(arrivals: Any, count: int) -> None:
    """Waits until a counter of this device has reached a count; what was stored before is then visible to loads."""
    pl.semaphore_wait(arrivals, value=count, decrement=False)


def wait_for_copies(arrivals: Any, count: int) -> None:
    """Waits as `wait_for_stores`; what was written before is then visible to copies."""
    wait_for_stores(arrivals, count)

    @plgpu.inline_mgpu()
    def order_copies(_: Any) -> None:
        # Copies use the async proxy, and the counter the generic one.
        llvm.inline_asm(None, [], "fence.proxy.async;", "~{memory}", has_side_effects=True)

    order_copies()  # pyright: ignore[reportCallIssue]  # the decorator gives the context
