"""Names the argument that a refusal is about: kernels refuse fields of a family's record, callers know arguments.

A family serves several operations, whose arguments have the names of the library that each comes from. A refusal
`<field>: <reason>` is given the name that the field has in the operation of the call.
"""

import dataclasses
import functools
from collections.abc import Mapping

from ejkernel.ops.model import Op

_CACHE_ARGUMENT_NAMES = ("kv_pages", "kv_cache", "key_cache", "key_buffer", "latent_cache", "key_indices_pages")
_QUERY_ARGUMENT_NAMES = ("query", "queries", "queries_nope", "r", "C")
ARGUMENTS_OF_FIELDS: Mapping[str, tuple[str, ...]] = {
    "key_pages": _CACHE_ARGUMENT_NAMES,
    "key_cache": (*_CACHE_ARGUMENT_NAMES, "key"),
    "kv_cache": (*_CACHE_ARGUMENT_NAMES, "key"),
    "block_tables": ("page_indices", "req_to_tokens", "lengths"),
    "query": _QUERY_ARGUMENT_NAMES,
    "queries": _QUERY_ARGUMENT_NAMES,
    "key": (*_CACHE_ARGUMENT_NAMES, "key_value", "k", "B"),
    "value": (*_CACHE_ARGUMENT_NAMES, "key_value", "v", "x"),
    "decay": ("g", "w", "slopes", "A"),
    "initial_state": ("recurrent_state",),
    "cu_seqlens": ("query_start_loc",),
    "x": ("hidden_states",),
    "lm_head": ("lm_head_weight",),
    "step": ("dt",),
    "pattern": ("mask_builder", "mask_info"),
}
"""The arguments that a field of a record may come from; an operation has at most one of them, or the first counts."""


def name_public_argument(op: Op, reason: str) -> str:
    """Returns a refusal with the operation's own argument in place of a field that it has under another name.

    Args:
        op: The operation of the call.
        reason: The refusal, `<field>: <reason>`; sentences of another form are returned unchanged.
    """
    field, colon, rest = reason.partition(":")
    arguments = _argument_names(op.arguments)
    if not colon or field in arguments:
        return reason
    return next((f"{name}:{rest}" for name in ARGUMENTS_OF_FIELDS.get(field, ()) if name in arguments), reason)


@functools.cache
def _argument_names(arguments: type) -> frozenset[str]:
    """Returns the names of an operation's arguments; dispatch asks for them with each refusal of each call."""
    return frozenset(field.name for field in dataclasses.fields(arguments))
