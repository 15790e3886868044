"""Collective matmul in Mosaic GPU, for NVIDIA's Hopper: one kernel per device, which sends while it multiplies.

The requirements of the kernels are data in this module, which imports nothing of Pallas.
"""

import dataclasses
import os
import re
from collections.abc import Iterator
from typing import Any

import jax

from ejkernel.families.collective_matmul import FAMILY, CollectiveMatmul, columns
from ejkernel.families.ring_attention import axis_size
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_pallas.gpu.collective_matmul import config
from ejkernel_pallas.gpu.hopper.sizes import SWIZZLE_COLUMNS
from ejkernel_pallas.gpu.requirements import hopper_requires

REMOTE_REFERENCES = ("jax>=0.11.2,<0.13",)
"""Versions of JAX that start a kernel only when its peers are ready; 0.11.2 was tested."""

COMMAND_BUFFER_FLAG = "--xla_gpu_enable_command_buffer"
"""The flag of XLA that says what it captures into CUDA graphs."""


def refusal_reasons(record: CollectiveMatmul) -> Iterator[str]:
    """Yields why the kernels refuse a record, beyond what `Requires` expresses."""
    devices = axis_size(record.axis_name)
    rows = record.x.shape[0] if record.collective == "all_gather" else record.x.shape[0] // devices
    if rows % config.BLOCK_M or not rows:
        yield f"a device has {rows} rows to exchange; the kernel wants a multiple of {config.BLOCK_M}"
    # Each axis is the column axis of a product in one pass, and the contracted axis in the other pass.
    sizes = {"contracted axis of x": record.x.shape[1], "output axis of y": columns(record)}
    for name, size in sizes.items():
        if size % (2 * SWIZZLE_COLUMNS) or not size:
            yield f"the {name} has {size} elements; the kernel wants a multiple of {2 * SWIZZLE_COLUMNS}"
    if devices == 1:
        return
    mesh_devices = jax.sharding.get_abstract_mesh().size
    if mesh_devices != devices:
        yield (
            f"axis {record.axis_name!r} has {devices} of the mesh's {mesh_devices} devices; the kernel wants all of "
            "them, as they start together"
        )
    if jax.process_count() > 1:
        yield f"there are {jax.process_count()} processes; the kernel wants one for all GPUs"
    if xla_captures_kernels():
        yield (
            "XLA may capture the kernel into a CUDA graph, which keeps other devices' addresses when they change; the "
            f"kernel wants XLA_FLAGS={COMMAND_BUFFER_FLAG}=-CUSTOM_CALL"
        )


def xla_captures_kernels() -> bool:
    """Returns whether XLA's flags let it capture kernels into CUDA graphs, as they do by default.

    On two H200 with jax 0.11.2, kernels in a graph wrote to where the other device's arrays had been when XLA captured
    it: gradients of products were wrong from the fourth call on, and right in all calls without graphs.
    """
    found = re.findall(rf"{COMMAND_BUFFER_FLAG}=(\S*)", os.environ.get("XLA_FLAGS", ""))
    if not found:
        return True
    kinds = [kind.upper() for kind in found[-1].split(",") if kind]
    changes_default = any(kind[0] in "+-" for kind in kinds)
    return "-CUSTOM_CALL" not in kinds if changes_default else "CUSTOM_CALL" in kinds


def _priority(record: Any, device: Any, direction: Any) -> int:
    """Returns the priority: above XLA's, except on one device, where nothing is sent.

    On two H200, 8192 x 8192 x 28672 a GPU, XLA's collective and one product take 1.16 times as long for the forward
    pass of the all-gather, and 1.05 times with gradients; for the reduce-scatter 1.05 and 1.06 times.
    """
    return 10 if axis_size(record.axis_name) > 1 else -1


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation."""
    requires = hopper_requires(handles={"precision"}, find_refusal_reasons=refusal_reasons)
    return (
        Implementation(
            family=FAMILY.name,
            name="mosaic_gpu",
            platform="pallas",
            forward="ejkernel_pallas.gpu.collective_matmul.forward:forward",
            backward="ejkernel_pallas.gpu.collective_matmul.backward:backward",
            gradients=frozenset(FAMILY.differentiable),
            requires=dataclasses.replace(requires, modules=REMOTE_REFERENCES),
            config=ConfigSpace.of(config, forward=config.HopperCollective),
            priority=_priority,
            cases="ejkernel_pallas.gpu.collective_matmul.cases:cases",
        ),
    )
