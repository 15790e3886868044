"""Ring attention: softmax attention over a sequence that is spread over devices."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ejkernel import _compat
from ejkernel.families import ring_attention as family
from ejkernel.families.ring_attention import RingAttention as Record
from ejkernel.families.ring_attention import axis_size
from ejkernel.modules.operations.cases import ring_attention as cases
from ejkernel.modules.operations.configs import RingAttentionConfig
from ejkernel.modules.operations.flash_attention import FlashAttentionArguments
from ejkernel.modules.operations.flash_attention import lower as lower_flash
from ejkernel.modules.operations.flash_attention import validate as validate_flash
from ejkernel.modules.operations.shared.lse import WithLse, with_lse
from ejkernel.modules.operations.shared.pair_functions import pair_functions
from ejkernel.modules.operations.shared.ring_placement import mesh_and_specs
from ejkernel.modules.operations.shared.shapes import (
    as_chunk_size,
    as_flag,
    as_number,
    as_window,
    check_dtype,
    describe_axes,
    got,
)
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.planning import packing
from ejkernel.types import MaskInfo
from ejkernel.types.integers import clamp_positions
from ejkernel.types.pair_functions import PairFunction


@document_options
def ring_attention(
    query: Float[Array, "b t h d"],
    key: Float[Array, "b s g d"],
    value: Float[Array, "b s g v"],
    softmax_aux: Float[Array, " sinks"] | Float[Array, "#h sinks"] | None = None,
    bias: Float[Array, "#b #h #t #k"] | None = None,
    *,
    mask_info: MaskInfo | None = None,
    mask_builder: Callable[..., Any] | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    causal: bool = False,
    logits_soft_cap: float | None = None,
    score_mod: Callable[..., Array] | PairFunction | None = None,
    mask_mod: Callable[..., Array] | PairFunction | None = None,
    softmax_scale: float | None = None,
    axis_name: str | None = None,
    fused_backward: bool = False,
    return_lse: bool = False,
    platform: str | None = None,
    cfg: RingAttentionConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b t h v"] | WithLse:
    """Computes softmax attention over a sequence spread over a mesh axis (Liu, Zaharia & Abbeel 2023,
    arXiv:2310.01889).

    Keys and values travel from device to device while each works on those it has, so that no device ever holds more
    than its part of the sequence, in either pass. The result is that of `flash_attention` on the whole sequence. Where
    the mask is causal, the devices exchange halves of their parts, so that all have the same work.

    Shape letters: B batch, T queries, S keys, H query heads, Hk KV heads, D head size, V value size. Query head h reads
    KV head `h // (H // Hk)`. The formula, term by term, is in `ejkernel.families.tiled_attention`.

    There are four ways to call it. With `axis_name` and `mesh`, or `axis_name` alone where a mesh is set, arrays are
    those of the whole call, in `jax.jit` too; `in_specs` and `out_specs` then say how batch and heads are split.
    Where `axis_name` is bound, in a function under `jax.shard_map` or `jax.pmap`, they are the calling device's part,
    device i having the i-th. With neither, one device has everything.

    Over devices, queries and keys are split over `axis_name`, batch and heads over any other axes. With `mesh` and no
    specs, batch and heads are split as the arrays are known to be.

    Args:
        query: [B, T, H, D] float16, bfloat16, float32 or float64.
        key: [B, S, Hk, D], dtype of query; H is a multiple of Hk.
        value: [B, S, Hk, V], dtype of query.
        softmax_aux: Sink logits, [H] one per head; `ejkernel.modules.operations.shared.sinks` has the other shapes.
            Differentiable.
        bias: [B|1, H|1, T|1, S|1] floating, added to the scaled scores before the soft cap; -inf masks. Differentiable.
            Where `axis_name` is bound its keys are those of all devices, its queries the device's own or everyone's.
        mask_info: Mask, segments and positions; applies together with everything else. An attention mask has the shape
            of a bias; segment ids and positions have that of their tokens.
        mask_builder: Not supported; giving one is an error.
        sliding_window: `w >= 1`, meaning `(w, w)`, or `(left, right)`: keys from `q - left` to `q + right`, inclusive;
            None on a side leaves it open, as does any int of `2**30` or more.
        chunk_size: Only tokens of the same run of `chunk_size` positions attend to each other.
        causal: Key position at most query position. Positions count from the first token of the whole sequence
            (top-left), unless `mask_info` gives them.
        logits_soft_cap: Cap c > 0 of `c * tanh(score / c)`.
        score_mod: `(score, b, h, q_idx, k_idx) -> score`, as `flash_attention` has it; q_idx and k_idx are indices in
            the whole sequence. Differentiable.
        mask_mod: `(b, h, q_idx, k_idx) -> bool`, as `flash_attention` has it, by the same indices. With either
            function, devices do not exchange halves of their parts. Where `axis_name` is bound, b and h count the
            rows and heads of the device.
        softmax_scale: Factor on the scores; None means `D ** -0.5`.
        axis_name: Mesh axis the sequence is spread over; None where it is not.
        fused_backward: True asks for the gradients of query, key and value in one sweep over the scores. Every
            implementation here works that way in any case.
        return_lse: True returns lse as well; `ejkernel.modules.operations.shared.lse` has the formula.

    Returns:
        [B, T, H, V] in query's dtype. Rows with nothing to attend are 0, and so is their gradient.
        With `return_lse`, lse [B, H, T] after the output: float32 (float64 for float64), natural logarithm, -inf
        where a row has nothing to attend and no sink. Differentiable.

    Raises:
        ValueError: `axis_name` is neither bound nor an axis of a mesh.
        NotImplementedError: `mask_builder` is given.

    Example:
        ```python
        import jax
        from ejkernel.modules import ring_attention

        mesh = jax.make_mesh((jax.device_count(),), ("sp",))
        query = jax.random.normal(jax.random.key(0), (1, 128, 8, 64))
        key = value = jax.random.normal(jax.random.key(1), (1, 128, 2, 64))
        with jax.set_mesh(mesh):
            output = ring_attention(query, key, value, axis_name="sp", causal=True)
        assert output.shape == (1, 128, 8, 64)
        ```
    """
    return run_operation(OP, locals())


class RingAttentionArguments(ArgumentRecord, of=ring_attention):
    """The arguments of a call of `ring_attention`."""

    def __post_init__(self) -> None:
        if self.mask_builder is not None:
            raise NotImplementedError(
                "mask_builder: got a value, wants None: ring_attention takes no pattern; pass mask_info, causal, "
                "sliding_window or chunk_size, or call blocksparse_attention"
            )
        axis: Any = self.axis_name
        if not isinstance(axis, str | None):
            raise ValueError(f"axis_name: got {got(axis)}, wants the name of one mesh axis, or None")
        scale, cap = self.softmax_scale, self.logits_soft_cap
        canonical = {
            "return_lse": as_flag("return_lse", self.return_lse),
            "softmax_scale": None if scale is None else as_number("softmax_scale", scale),
            "causal": as_flag("causal", self.causal),
            "sliding_window": as_window("sliding_window", self.sliding_window),
            "chunk_size": as_chunk_size("chunk_size", self.chunk_size),
            "logits_soft_cap": None if cap is None else as_number("logits_soft_cap", cap, greater_than=0),
            "fused_backward": as_flag("fused_backward", self.fused_backward),
            **pair_functions(self.score_mod, self.mask_mod, self.query),
        }
        for name, value in canonical.items():
            object.__setattr__(self, name, value)


def validate(args: RingAttentionArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    info: Any = args.mask_info
    if not isinstance(info, MaskInfo | None):
        raise ValueError(f"mask_info: got {got(info)}, wants a MaskInfo")
    validate_flash(_without_pair_arguments(args))
    _check_pair_array("bias", args.bias, args)
    if args.bias is not None:
        check_dtype("bias", args.bias, jnp.floating, "a floating dtype")
    _check_pair_array("mask_info.attention_mask", None if info is None else info.explicit_mask, args)


def _check_pair_array(name: str, array: Any, args: RingAttentionArguments) -> None:
    """Checks an array of (query, key) pairs: its keys are those of all devices, its queries may be this one's."""
    if array is None:
        return
    (b, t, h, _), s, parts = args.query.shape, args.key.shape[1], axis_size(args.axis_name)
    shape = tuple(getattr(array, "shape", ()))
    accepted = ({1, b}, {1, h}, {1, t, t * parts}, {1, s * parts})
    if len(shape) != 4 or not all(size in sizes for size, sizes in zip(shape, accepted, strict=True)):
        wants = describe_axes(["B", "H", "T", "S"], {"B": b, "H": h, "T": t, "S": s * parts}, ["B", "H", "T", "S"])
        whole = f", S counting the keys of all {parts} devices" if parts > 1 else ""
        raise ValueError(f"{name}: got shape {shape}, wants {wants}{whole}")


def lower(args: RingAttentionArguments) -> Record:
    """Returns the ring record of a call."""
    dense = lower_flash(_without_pair_arguments(args))
    same = ("query", "key", "value", "softmax_scale", "q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions")
    same = (*same, "softmax_aux", "causal", "sliding_window", "logits_soft_cap")
    record = Record(
        **{name: getattr(dense, name) for name in same},
        axis_name=args.axis_name,
        score_mod=args.score_mod,
        mask_mod=args.mask_mod,
        bias=_rows_of_local_queries(args.bias, args),
        mask=None if args.mask_info is None else _rows_of_local_queries(args.mask_info.explicit_mask, args),
    )
    if args.chunk_size is not None:
        record = _with_chunk_segments(record, args.mask_info or MaskInfo(), args.chunk_size)
    # Where `shard_map` keeps track of what varies, arrays that do not get their gradient summed over the devices.
    return _compat.as_varying(record, record)


def _without_pair_arguments(args: RingAttentionArguments) -> FlashAttentionArguments:
    """Returns the call without its (query, key) pairs, of which a device may hold another part than of its tokens."""
    return FlashAttentionArguments(
        query=args.query,
        key=args.key,
        value=args.value,
        softmax_aux=args.softmax_aux,
        mask_info=None if args.mask_info is None else args.mask_info.without("attention_mask"),
        sliding_window=args.sliding_window,
        causal=args.causal,
        logits_soft_cap=args.logits_soft_cap,
        softmax_scale=args.softmax_scale,
        dropout_prob=0.0,
        normalize_output=True,
        precision=None,
        logits_dtype=jnp.float32,
    )


def _rows_of_local_queries(pairs: jax.Array | None, args: RingAttentionArguments) -> jax.Array | None:
    """Returns the rows of this device's queries."""
    length = args.query.shape[1]
    if pairs is None or args.axis_name is None or pairs.shape[2] in (1, length):
        return pairs
    return lax.dynamic_slice_in_dim(pairs, lax.axis_index(args.axis_name) * length, length, axis=2)


def _with_chunk_segments(record: Record, info: MaskInfo, size: int) -> Record:
    """Returns the record with chunks for segments, or with segments cut into chunks."""
    rows = record.query.shape[0]
    positions = ((info.q_positions, record.query.shape[1]), (info.kv_positions, record.key.shape[1]))
    chunks = [
        _global_token_indices(record, n)[None] // size if x is None else clamp_positions(x) // size
        for x, n in positions
    ]
    chunks = [jnp.broadcast_to(x, (rows, x.shape[1])) for x in chunks]
    if record.q_segment_ids is not None and record.kv_segment_ids is not None:
        chunks = _combine_segment_ids(record, (record.q_segment_ids, record.kv_segment_ids), (chunks[0], chunks[1]))
    return dataclasses.replace(record, q_segment_ids=chunks[0], kv_segment_ids=chunks[1])


def _global_token_indices(record: Record, num_local_tokens: int) -> jax.Array:
    """Returns indices in the whole sequence of this device's tokens, [length] int32."""
    indices = jnp.arange(num_local_tokens, dtype=jnp.int32)
    return (
        indices if axis_size(record.axis_name) == 1 else indices + lax.axis_index(record.axis_name) * num_local_tokens
    )


Ids = tuple[jax.Array, jax.Array]


def _combine_segment_ids(record: Record, one: Ids, other: Ids) -> Ids:
    """Returns segment ids that are equal where both given pairs are. All devices have to number the pairs alike."""
    if axis_size(record.axis_name) == 1:
        return packing.both_ids(one, other)
    axis, index = record.axis_name, lax.axis_index(record.axis_name)
    one, other = (tuple(lax.all_gather(x, axis, axis=1, tiled=True) for x in pair) for pair in (one, other))
    both, lengths = packing.both_ids(one, other), (record.query.shape[1], record.key.shape[1])
    local = [lax.dynamic_slice_in_dim(x, index * n, n, axis=1) for x, n in zip(both, lengths, strict=True)]
    return local[0], local[1]


def reference(args: RingAttentionArguments) -> Any:
    """Returns the operation's meaning in plain jnp."""
    output, residuals = family.reference(lower(args))
    return with_lse(args, output, residuals.lse)


class RingAttention(Kernel[RingAttentionConfig, Array]):
    """Wraps `ring_attention` in an object that an `Executor` can call."""


def _route_to_mesh_in_use(args: RingAttentionArguments, options: dict[str, Any]) -> tuple[Op, Any, dict[str, Any]]:
    """Returns the call on the mesh around it, where it gives none."""
    sharding_options = (options[name] for name in ("mesh", "in_specs", "out_specs"))
    return OP, args, {**options, **mesh_and_specs(args, *sharding_options)}


OP = Op(
    arguments=RingAttentionArguments,
    family=family.FAMILY,
    validate=validate,
    lower=lower,
    reference=reference,
    cases=cases.cases(RingAttentionArguments),
    make_inputs=cases.make_inputs,
    axes={"softmax_aux": "h n"},
    route=_route_to_mesh_in_use,
    lse="b h t",
)
RingAttention.op = OP
