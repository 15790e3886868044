"""The names of what the bits of a row may depend on in a call with several rows, and their meanings."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

INVARIANCES: Mapping[str, str] = MappingProxyType(
    {
        "batch": "How many other rows, sequences or requests the call has, what they hold, and the order of all.",
        "padding": "How far the arrays reach beyond a sequence: masked keys after its last, longer page tables.",
        "packing": "Which other sequences share a packed row, and where in that row a sequence begins.",
        "chunking": "How many of a sequence's queries one call has: a whole prompt, chunks of it, or one new token.",
        "pages": "How many tokens a page of the cache holds, and which pages hold the tokens of a sequence.",
    }
)
"""Name -> what may change without changing the bits of a row, if an implementation claims the name."""


def invariances_of_recurrences(record: Any) -> frozenset[str]:
    """Returns what the rows of a recurrence may depend on; `packing` is included only if sequences share rows."""
    shares_rows = any(getattr(record, name, None) is not None for name in ("cu_seqlens", "segment_ids"))
    return frozenset({"batch", "padding", "chunking", *(("packing",) if shares_rows else ())})


def depends_on_batch(record: Any) -> frozenset[str]:
    """Returns what the rows of a record may depend on by default: the batch."""
    return frozenset({"batch"})
