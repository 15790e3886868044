"""Fused cross-entropy: the loss of a language model, without its logits in memory."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import export, lax
from jaxtyping import Array, Bool, Float, Integer, Num

from ejkernel.families import cross_entropy as family
from ejkernel.modules.operations.cases import fused_cross_entropy as cases
from ejkernel.modules.operations.configs import FusedCrossEntropyConfig
from ejkernel.modules.operations.shared import token_losses
from ejkernel.modules.operations.shared.head_function import head_function_loss
from ejkernel.modules.operations.shared.paged_arguments import (
    as_choice,
    as_soft_cap,
    set_canonical_fields,
    with_tuning_arguments,
)
from ejkernel.modules.operations.shared.shapes import (
    as_count,
    as_flag,
    as_float_dtype,
    as_number,
    check_dtype,
    check_not_empty,
    check_same_dtype,
    check_shape,
    got,
)
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.ops.values import Condition, are_integer_arrays

CHUNK_STRATEGIES = ("vocab", "token", "block")


class CrossEntropyOutput(NamedTuple):
    """The results of `fused_cross_entropy`. Only `loss` has a gradient.

    Attributes:
        loss: The mean or the sum over tokens, [], or every token's loss, [...]; with its z-loss.
        z_loss: The part of it that is the z-loss, reduced in the same way.
        weight_sum: [], the sum of the weights of tokens that are not ignored: what the mean divides by.
        accuracy: [], the part of that weight whose largest logit is the target's; None with soft targets.
    """

    loss: Array
    z_loss: Array
    weight_sum: Array
    accuracy: Array | None


export.register_namedtuple_serialization(CrossEntropyOutput, serialized_name="ejkernel.modules.CrossEntropyOutput")


@document_options
def fused_cross_entropy(
    logits: Float[Array, "... v"] | None = None,
    targets: Integer[Array, "..."] | None = None,
    weights: Float[Array, "..."] | None = None,
    *,
    hidden: Float[Array, "... d"] | None = None,
    lm_head_weight: Float[Array, "d v"] | None = None,
    lm_head_bias: Float[Array, " v"] | None = None,
    lm_head_fn: Callable[[Array], Array] | None = None,
    logit_softcap: float | None = None,
    chunk_size: int = 0,
    chunk_strategy: Literal["vocab", "token", "block"] = "vocab",
    attention_mask: Num[Array, "..."] | Bool[Array, "..."] | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_targets: Float[Array, "... v"] | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    vocab_parallel_axis: str | None = None,
    compute_dtype: Any = None,
    checkpoint: bool = True,
    sparse_skip: bool = False,
    check_vma: bool = False,
    platform: str | None = None,
    cfg: FusedCrossEntropyConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> CrossEntropyOutput:
    """Returns the cross-entropy of logits, or of hidden states and the matrix that computes logits from them.

    Shape letters: `...` the axes of the tokens, V entries of the vocabulary, D channels. The logits of hidden states
    are computed one block at a time and then dropped: no array has all tokens and the whole vocabulary, in either
    pass. Logits and sums are float32 (float64 for float64). The formulas are in `ejkernel.families.cross_entropy`.

        out = fused_cross_entropy(hidden=x, lm_head_weight=embedding.T, targets=next_tokens, z_loss=1e-4)
        out.loss, out.accuracy

    The axes of tokens can be split over devices. To split the vocabulary, call within `jax.shard_map` with
    `vocab_parallel_axis`.

    Args:
        logits: [..., V] floating; or hidden.
        targets: [...] int, the entry that each token is to predict, from 0 to V - 1, or ignore_index. Any other
            value is an error if targets are not traced; in a traced call, it results in a loss of NaN.
        weights: [...] floating, a factor on every token's loss; None for ones. Tokens of weight 0 may hold NaN.
        hidden: [..., D] floating; with lm_head_weight or lm_head_fn.
        lm_head_weight: [D, V], dtype of hidden.
        lm_head_bias: [V] floating; goes with lm_head_weight.
        lm_head_fn: A function of some hidden states [n, D] that returns their logits [n, V], instead of
            lm_head_weight: a head with other arithmetic. JAX differentiates it, also by the arrays it closes over. It
            runs again in the backward pass.
        logit_softcap: The logits x become `cap * tanh(x / cap)`; None for no cap.
        chunk_size: Tokens or entries of the vocabulary in a block; 0 leaves it to the configuration. Only tunes.
        chunk_strategy: What chunk_size counts: `"token"`, `"vocab"`, or `"block"` for both. With lm_head_fn it always
            counts tokens.
        attention_mask: [...] numbers or bool, a further factor on the weights.
        ignore_index: The target of tokens to leave out of the loss.
        label_smoothing: The part of a target that is spread evenly over the vocabulary, from 0 to 1.
        z_loss: Factor of the squared log-sum-exp in the loss.
        soft_targets: [..., V] floating, distributions to predict, instead of targets. Has no gradient.
        reduction: `"mean"` over the weights, which is 0 where they are all 0; `"sum"`; or `"none"`.
        vocab_parallel_axis: Name of the mesh axis over which V is split: each device has its part of the logits, or of
            lm_head_weight and lm_head_bias, and of soft_targets, in order and of one size. Targets count entries of the
            whole vocabulary.
        compute_dtype: The dtype that hidden and lm_head_weight are multiplied in; None for theirs.
        checkpoint: Has no effect: logits are never kept, but computed again where they are needed.
        sparse_skip: Has no effect: blocks are not skipped.
        check_vma: Has no effect: how results vary over a mesh follows from the arguments.

    Returns:
        `CrossEntropyOutput(loss, z_loss, weight_sum, accuracy)`. Only the loss has a gradient: of logits, or of hidden,
        lm_head_weight and lm_head_bias. Arrays are float32 (float64 for float64).

    Raises:
        NotImplementedError: Differentiated with respect to weights or soft_targets.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        from ejkernel.modules import fused_cross_entropy

        keys = jax.random.split(jax.random.key(0), 2)
        hidden, head = jax.random.normal(keys[0], (2, 5, 8)), jax.random.normal(keys[1], (8, 16))
        targets = jnp.array([[3, 1, 4, 1, 5], [9, 2, 6, -100, -100]])  # the last two are padding
        out = fused_cross_entropy(hidden=hidden, lm_head_weight=head, targets=targets)
        logits = jax.nn.log_softmax(hidden @ head)
        plain = -jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        assert jnp.allclose(out.loss, plain[targets >= 0].mean(), rtol=1e-5)
        assert out.weight_sum == 8
        ```
    """
    if lm_head_fn is not None:
        return head_function_loss(fused_cross_entropy, locals())
    return run_operation(OP, locals())


class FusedCrossEntropyArguments(ArgumentRecord, of=fused_cross_entropy):
    """The arguments of a call of `fused_cross_entropy`."""

    def __post_init__(self) -> None:
        as_choice("reduction", self.reduction, token_losses.REDUCTIONS)
        as_choice("chunk_strategy", self.chunk_strategy, CHUNK_STRATEGIES)
        smoothing = as_number("label_smoothing", self.label_smoothing, minimum=0)
        if smoothing > 1:
            raise ValueError(f"label_smoothing: got {smoothing}, wants at most 1")
        dtype = self.compute_dtype
        set_canonical_fields(
            self,
            logit_softcap=as_soft_cap("logit_softcap", self.logit_softcap),
            chunk_size=as_count("chunk_size", self.chunk_size),
            ignore_index=token_losses.as_signed_integer("ignore_index", self.ignore_index),
            label_smoothing=smoothing,
            z_loss=as_number("z_loss", self.z_loss, minimum=0),
            compute_dtype=None if dtype is None else as_float_dtype("compute_dtype", dtype),
            checkpoint=as_flag("checkpoint", self.checkpoint),
            sparse_skip=as_flag("sparse_skip", self.sparse_skip),
            check_vma=as_flag("check_vma", self.check_vma) and False,
        )


def validate(args: FusedCrossEntropyArguments) -> None:
    """Raises ValueError for arguments that are wrong on every backend."""
    token_losses.check_exactly_one("logits", args.logits, "hidden", args.hidden)
    token_losses.check_exactly_one("targets", args.targets, "soft_targets", args.soft_targets)
    entries = _check_head(args)
    tokens = tuple(_logits_or_last_states(args).shape[:-1])
    if args.targets is not None:
        token_losses.check_token_axes("targets", args.targets, tokens)
        check_dtype("targets", args.targets, jnp.integer, "an integer dtype")
    if args.soft_targets is not None:
        token_losses.check_token_axes("soft_targets", args.soft_targets, tokens, entries)
        check_dtype("soft_targets", args.soft_targets, jnp.floating, "a floating dtype")
    token_losses.check_token_weights(args, tokens)


def _check_head(args: FusedCrossEntropyArguments) -> int:
    """Returns V, and refuses a head without hidden states, or of other sizes than theirs."""
    name = "logits" if args.hidden is None else "hidden"
    rows = _logits_or_last_states(args)
    if not rows.ndim or rows.shape[-1] == 0:
        last = "V" if args.hidden is None else "D"
        raise ValueError(f"{name}: got shape {tuple(rows.shape)}, wants [..., {last}] with {last} of at least 1")
    check_dtype(name, rows, jnp.floating, "a floating dtype")
    head, bias = args.lm_head_weight, args.lm_head_bias
    if args.hidden is None:
        for name, array in (("lm_head_weight", head), ("lm_head_bias", bias)):
            if array is not None:
                raise ValueError(f"{name}: got {got(array)} with logits, wants hidden instead of logits")
        return rows.shape[-1]
    if head is None:
        raise ValueError("lm_head_weight: got None with hidden, wants [D, V], or lm_head_fn")
    sizes = {"D": rows.shape[-1]}
    check_shape("lm_head_weight", head, "D V", sizes)
    check_not_empty("lm_head_weight", head, "D V", "V")
    check_same_dtype({"hidden": rows, "lm_head_weight": head})
    if bias is not None:
        check_shape("lm_head_bias", bias, "V", sizes)
        check_dtype("lm_head_bias", bias, jnp.floating, "a floating dtype")
    return sizes["V"]


def _logits_or_last_states(args: FusedCrossEntropyArguments) -> jax.Array:
    return args.logits if args.hidden is None else args.hidden


def _local_vocab_size(args: FusedCrossEntropyArguments) -> int:
    """Returns how many entries of the vocabulary this device has."""
    return args.logits.shape[-1] if args.hidden is None else args.lm_head_weight.shape[-1]


def conditions(args: FusedCrossEntropyArguments) -> Iterable[Condition]:
    """Yields that targets are entries of the vocabulary, where that is not split."""
    split, matrix = args.vocab_parallel_axis is not None, args.logits if args.hidden is None else args.lm_head_weight
    if args.targets is None or split or not are_integer_arrays(args.targets) or not getattr(matrix, "shape", ()):
        return  # `validate` refuses what is missing or wrong
    yield token_losses.condition_of_targets(args.targets, matrix.shape[-1], args.ignore_index)


def _weight_per_token(args: FusedCrossEntropyArguments) -> jax.Array:
    """Returns every token's weight, 0 for tokens to ignore."""
    dtype = jnp.promote_types(_logits_or_last_states(args).dtype, jnp.float32)
    weights = token_losses.token_weights(args, dtype)
    if weights is None:
        weights = jnp.ones(_logits_or_last_states(args).shape[:-1], dtype)
    return weights if args.targets is None else jnp.where(args.targets == args.ignore_index, 0, weights)


def _num_vocab_shards(args: FusedCrossEntropyArguments) -> int:
    axis = args.vocab_parallel_axis
    return 1 if axis is None else lax.axis_size(axis)


def _nan_for_unknown_targets(args: FusedCrossEntropyArguments, weights: jax.Array) -> jax.Array:
    """Returns the weights, NaN for tokens whose target is no entry of the vocabulary."""
    if args.targets is None:
        return weights
    known = (args.targets >= 0) & (args.targets < _local_vocab_size(args) * _num_vocab_shards(args))
    return jnp.where(known | (weights == 0), weights, jnp.nan)


def lower(args: FusedCrossEntropyArguments) -> family.CrossEntropy:
    """Returns the record of a call. A vocabulary that is split has the weights and the z-loss applied in `finish`."""
    rows, head, split = _logits_or_last_states(args), args.lm_head_weight, args.vocab_parallel_axis is not None
    rows = rows.reshape(-1, rows.shape[-1])
    if args.compute_dtype is not None and head is not None:
        rows, head = rows.astype(args.compute_dtype), head.astype(args.compute_dtype)
    unchecked = _weight_per_token(args)
    weights = (unchecked != 0).astype(unchecked.dtype) if split else _nan_for_unknown_targets(args, unchecked)
    if args.reduction == "mean" and not split:
        total = jnp.sum(unchecked)
        weights = weights / jnp.where(total == 0, 1, total)
    first = lax.axis_index(args.vocab_parallel_axis) * _local_vocab_size(args) if split else 0
    targets = jnp.zeros(rows.shape[0], jnp.int32) if args.targets is None else args.targets.reshape(-1)
    soft = args.soft_targets
    return family.CrossEntropy(
        inputs=rows,
        targets=local_target_indices(targets, first),
        weights=weights.reshape(-1),
        lm_head=head,
        lm_head_bias=args.lm_head_bias,
        soft_targets=None if soft is None else soft.reshape(-1, soft.shape[-1]),
        logits_soft_cap=args.logit_softcap,
        label_smoothing=_local_label_smoothing(args),
        z_loss=0.0 if split else args.z_loss,
        sum_over_tokens=args.reduction != "none" and not split,
    )


def local_target_indices(targets: jax.Array, first_local_index: Any) -> jax.Array:
    """Returns targets as int32, relative to a device's first entry; -1 for those that are no int32."""
    wide = jnp.where((targets >= 0) & (targets < 2**31 - 1), targets, -1).astype(jnp.int32)
    return jnp.where(wide < 0, -1, wide - first_local_index)


def _local_label_smoothing(args: FusedCrossEntropyArguments) -> float:
    """Returns the smoothing of one device's part of the vocabulary: the even part is spread over its entries alone, in
    the same proportion to the target's part.
    """
    part, shards = args.label_smoothing, _num_vocab_shards(args)
    return part / shards / (1 - part + part / shards)


def finish(args: FusedCrossEntropyArguments, output: Any) -> CrossEntropyOutput:
    """Returns the public results of a call."""
    loss, lse, largest, entry = output
    if args.vocab_parallel_axis is not None:
        loss, lse, entry = _combine_over_vocab_shards(args, loss, lse, largest, entry)
    weights, shape = _weight_per_token(args), _logits_or_last_states(args).shape[:-1]
    lse, entry = (lax.stop_gradient(x).reshape(shape) for x in (lse, entry))
    z_loss = token_losses.reduce_losses(args.z_loss * lse**2, weights, args)
    loss = loss.reshape(shape) if args.reduction == "none" else jnp.sum(loss)
    if args.reduction == "mean" and args.vocab_parallel_axis is not None:
        loss = token_losses.average_loss(loss, weights)
    right = None if args.targets is None else jnp.sum(jnp.where(entry == args.targets, weights, 0))
    accuracy = None if right is None else token_losses.average_loss(right, weights)
    return CrossEntropyOutput(loss, *jax.tree.map(lax.stop_gradient, (z_loss, jnp.sum(weights), accuracy)))


def _combine_over_vocab_shards(
    args: FusedCrossEntropyArguments, loss: Any, lse: Any, largest_logit: Any, largest_logit_index: Any
) -> tuple[Any, Any, Any]:
    """Returns losses, log-sum-exps and best entries of tokens from those of each device's part of the vocabulary."""
    axis, part, shards = args.vocab_parallel_axis, args.label_smoothing, _num_vocab_shards(args)
    record = lower(args)
    mass = family.target_probability_sums(record)
    local = record.label_smoothing
    whole = lax.psum((mass - local) / (1 - local), axis) * (1 - part) + part if local < 1 else jnp.ones((), loss.dtype)
    # Each device computes the loss with its local softmax. Subtracting the local log-sum-exp leaves the expected logit.
    expected = lax.psum(lse * mass - loss, axis) * (1 - part + part / shards)
    whole_lse = token_losses.lse_over_devices(lse, axis)
    weights = _nan_for_unknown_targets(args, _weight_per_token(args)).reshape(-1)
    losses = jnp.where(weights == 0, 0, weights * (whole_lse * whole - expected + args.z_loss * whole_lse**2))
    best = lax.pmax(lax.stop_gradient(largest_logit), axis)
    first = lax.axis_index(axis) * _local_vocab_size(args)
    largest_logit_index = lax.pmin(
        jnp.where(largest_logit == best, lax.stop_gradient(largest_logit_index) + first, jnp.inf), axis
    )
    return losses, whole_lse, largest_logit_index


def _configure(args: FusedCrossEntropyArguments, cfg: Any) -> Any:
    """Returns the configuration with the arguments that only tune."""
    tokens, entries = args.chunk_strategy != "vocab", args.chunk_strategy != "token"
    return with_tuning_arguments(
        FusedCrossEntropyConfig,
        cfg,
        block_m=args.chunk_size if args.chunk_size and tokens else None,
        block_v=args.chunk_size if args.chunk_size and entries else None,
        checkpoint=None if args.checkpoint else False,
        sparse_skip=True if args.sparse_skip else None,
    )


def _axes_of(args: FusedCrossEntropyArguments) -> dict[str, Any]:
    """Returns the axis letters of a call's arrays."""
    tokens = token_losses.token_axis_letters(_logits_or_last_states(args).ndim - 1)
    each = tokens if args.reduction == "none" else ""
    output = (each, each, "") + (() if args.targets is None else ("",))
    return {"logits": f"{tokens} v".strip(), "targets": tokens, "weights": tokens, "output": output}


class FusedCrossEntropy(Kernel[FusedCrossEntropyConfig, CrossEntropyOutput]):
    """Wraps `fused_cross_entropy` in an object that an `Executor` can call."""


OP = Op(
    arguments=FusedCrossEntropyArguments,
    family=family.FAMILY,
    validate=validate,
    lower=lower,
    cases=cases.cases(FusedCrossEntropyArguments),
    make_inputs=cases.make_inputs,
    axes={"logits": "t v", "targets": "t", "weights": "t"},
    axes_of=_axes_of,
    output=("", "", "", ""),
    finish=finish,
    configure=_configure,
    conditions=conditions,
)
FusedCrossEntropy.op = OP
