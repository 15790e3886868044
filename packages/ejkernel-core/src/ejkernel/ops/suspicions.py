"""Writes sentences about calls that are valid and probably not what the caller means."""

from typing import Any

from ejkernel.ops.model import Op


def suspicious_argument_warnings(op: Op, args: Any) -> tuple[str, ...]:
    """Returns what `explain` warns of.

    Args:
        op: The operation.
        args: The call's argument record.
    """
    return tuple(_arrays_with_more_heads_than_tokens(op, args))


def _arrays_with_more_heads_than_tokens(op: Op, args: Any) -> list[str]:
    """Returns the arrays [B, T, H, D] that have fewer tokens than heads, and so may be [B, H, T, D]. An array with one
    token is a decoding step and is not suspicious.
    """
    notes: list[str] = []
    for name, axes in op.letters(args)[0].items():
        letters, shape = axes.split(), getattr(getattr(args, name), "shape", ())
        if letters[:3] != ["b", "t", "h"] or len(letters) != 4 or len(shape) != 4:
            continue
        tokens, heads = shape[1], shape[2]
        if isinstance(tokens, int) and isinstance(heads, int) and 1 < tokens < heads:
            notes.append(
                f"warning: {name} {list(shape)} has {tokens} tokens and {heads} heads, as [B, T, H, D]; "
                "swap axes 1 and 2 if it is [B, H, T, D]"
            )
    return notes
