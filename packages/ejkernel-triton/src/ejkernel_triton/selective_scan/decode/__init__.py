"""The decode step of the selective scan: one to eight tokens of each sequence, the states updated in place."""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.selective_scan import scan_sequences
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.planning.decode_lengths import length_refusals
from ejkernel_triton.requirements import triton_implementation, triton_requires
from ejkernel_triton.selective_scan.decode import config

DTYPES = ("float16", "bfloat16", "float32")

MAX_STATE_DIM = 256
"""The largest state dimension of the decode step."""


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons why the decode step refuses a record that `Requires` cannot express."""
    yield from length_refusals("x", record.x.shape[1], record.cu_seqlens)
    yield from scan_refusal_reasons(record)


def scan_refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons why neither the scan nor its decode step can serve a record that `Requires` cannot express."""
    if str(record.step.dtype) not in DTYPES:
        yield f"dt of {record.step.dtype} is not among {', '.join(DTYPES)}"


def implementations() -> tuple[Implementation, ...]:
    """Returns the decode step of the scan."""
    return (
        triton_implementation(
            "selective_scan",
            name="triton_decode",
            forward="selective_scan.decode.forward:forward",
            requires=triton_requires(
                head_dims=range(1, MAX_STATE_DIM + 1),
                handles=scan_sequences.PACKED_STATE_FIELDS | {"initial_state"},
                extra_reasons=_refusal_reasons,
            ),
            config=ConfigSpace.of(config, forward=config.ScanDecodeTile),
            # The priority is above the scans of all packages, which would mask all but one token of a block.
            priority=30,
            cases="ejkernel_triton.selective_scan.decode.cases:cases",
        ),
    )
