"""Fused KL divergence: how far a student's distribution over the vocabulary is from a teacher's."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import export, lax
from jaxtyping import Array, Bool, Float, Num

from ejkernel.families import kl_divergence as family
from ejkernel.modules.operations.cases import fused_kl_divergence as cases
from ejkernel.modules.operations.configs import FusedKLDivergenceConfig
from ejkernel.modules.operations.shared import token_losses
from ejkernel.modules.operations.shared.paged_arguments import as_choice, set_canonical_fields
from ejkernel.modules.operations.shared.shapes import as_flag, as_number, check_dtype
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation


class KLDivergenceOutput(NamedTuple):
    """The results of `fused_kl_divergence`. Only `loss` has a gradient.

    Attributes:
        loss: The mean or the sum over tokens, [], or every token's divergence, [...]; times its weight.
        weight_sum: [], the sum of the weights: what the mean divides by.
        teacher_entropy: The entropy of the teacher's distribution, reduced as the loss and times the squared
            temperature; None unless it is asked for. Forward, the loss and the entropy add up to the cross-entropy.
    """

    loss: Array
    weight_sum: Array
    teacher_entropy: Array | None


export.register_namedtuple_serialization(KLDivergenceOutput, serialized_name="ejkernel.modules.KLDivergenceOutput")


@document_options
def fused_kl_divergence(
    student_logits: Float[Array, "... v"],
    teacher_logits: Float[Array, "... v"],
    weights: Float[Array, "..."] | None = None,
    *,
    attention_mask: Num[Array, "..."] | Bool[Array, "..."] | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    direction: Literal["forward", "reverse", "jsd"] = "forward",
    temperature: float = 1.0,
    beta: float = 0.5,
    vocab_parallel_axis: str | None = None,
    return_teacher_entropy: bool = False,
    check_vma: bool = False,
    platform: str | None = None,
    cfg: FusedKLDivergenceConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> KLDivergenceOutput:
    """Returns the divergence of a student's distributions from a teacher's, the loss of distillation.

    Shape letters: `...` the axes of the tokens, V entries of the vocabulary. No array of probabilities is kept: each
    pass reads the logits, and sums in float32 (float64 for float64). The formulas are in
    `ejkernel.families.kl_divergence`.

    The axes of tokens can be split over devices. To split the vocabulary, call within `jax.shard_map` with
    `vocab_parallel_axis`.

    Args:
        student_logits: [..., V] floating.
        teacher_logits: [..., V] floating. Has no gradient.
        weights: [...] floating, a factor on every token's loss; None for ones. Tokens of weight 0 may hold NaN.
        attention_mask: [...] numbers or bool, a further factor on the weights.
        reduction: `"mean"` over the weights, which is 0 where they are all 0; `"sum"`; or `"none"`.
        direction: `"forward"` for KL(teacher, student), `"reverse"` for KL(student, teacher), `"jsd"` for
            `beta KL(teacher, m) + (1 - beta) KL(student, m)` with `m = beta teacher + (1 - beta) student`.
        temperature: What both logits are divided by, above 0. The loss is multiplied by its square.
        beta: Above 0 and below 1; for `"jsd"` alone.
        vocab_parallel_axis: Name of the mesh axis over which V is split: each device has its part of both logits, in
            the same order.
        return_teacher_entropy: Whether to return the entropy of the teacher's distributions.
        check_vma: Has no effect: how results vary over a mesh follows from the arguments.

    Returns:
        `KLDivergenceOutput(loss, weight_sum, teacher_entropy)`, float32 (float64 for float64). Only the loss has a
        gradient: of student_logits.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        from ejkernel.modules import fused_kl_divergence

        student, teacher = jax.random.normal(jax.random.key(0), (2, 3, 5, 16))
        loss = fused_kl_divergence(student, teacher, temperature=2.0).loss
        p, q = (jax.nn.log_softmax(x / 2) for x in (student, teacher))
        assert jnp.allclose(loss, 4 * (jnp.exp(q) * (q - p)).sum(-1).mean(), rtol=1e-4)
        ```
    """
    return run_operation(OP, locals())


class FusedKLDivergenceArguments(ArgumentRecord, of=fused_kl_divergence):
    """The arguments of a call of `fused_kl_divergence`."""

    def __post_init__(self) -> None:
        as_choice("reduction", self.reduction, token_losses.REDUCTIONS)
        as_choice("direction", self.direction, family.DIRECTIONS)
        set_canonical_fields(
            self,
            temperature=as_number("temperature", self.temperature, greater_than=0),
            beta=as_number("beta", self.beta, greater_than=0, less_than=1),
            return_teacher_entropy=as_flag("return_teacher_entropy", self.return_teacher_entropy),
            check_vma=as_flag("check_vma", self.check_vma) and False,
        )


def validate(args: FusedKLDivergenceArguments) -> None:
    """Raises ValueError for arguments that are wrong on every backend."""
    student = args.student_logits
    if not student.ndim or student.shape[-1] == 0:
        raise ValueError(f"student_logits: got shape {tuple(student.shape)}, wants [..., V] with V of at least 1")
    for name in ("student_logits", "teacher_logits"):
        token_losses.check_token_axes(name, getattr(args, name), tuple(student.shape))
        check_dtype(name, getattr(args, name), jnp.floating, "a floating dtype")
    token_losses.check_token_weights(args, tuple(student.shape[:-1]))


def _weight_per_token(args: FusedKLDivergenceArguments) -> jax.Array:
    """Returns every token's weight."""
    dtype = jnp.promote_types(args.student_logits.dtype, jnp.float32)
    weights = token_losses.token_weights(args, dtype)
    return jnp.ones(args.student_logits.shape[:-1], dtype) if weights is None else weights


def lower(args: FusedKLDivergenceArguments) -> family.KLDivergence:
    """Returns the record of a call; its weights are applied in `finish`."""
    entries = args.student_logits.shape[-1]
    return family.KLDivergence(
        student=args.student_logits.reshape(-1, entries),
        teacher=lax.stop_gradient(args.teacher_logits.reshape(-1, entries)),
        token_mask=(_weight_per_token(args) != 0).reshape(-1),
        direction=args.direction,
        temperature=args.temperature,
        beta=args.beta,
        vocab_axis=args.vocab_parallel_axis,
    )


def finish(args: FusedKLDivergenceArguments, output: Any) -> KLDivergenceOutput:
    """Returns the public results of a call."""
    weights = _weight_per_token(args)
    loss, entropy = (
        token_losses.reduce_losses(
            token_losses.sum_over_mesh_axis(x, args.vocab_parallel_axis).reshape(weights.shape), weights, args
        )
        for x in output
    )
    entropy = lax.stop_gradient(entropy) if args.return_teacher_entropy else None
    return KLDivergenceOutput(loss, lax.stop_gradient(jnp.sum(weights)), entropy)


def _axes_of(args: FusedKLDivergenceArguments) -> dict[str, Any]:
    """Returns the axis letters of a call's arrays."""
    tokens = token_losses.token_axis_letters(args.student_logits.ndim - 1)
    each = tokens if args.reduction == "none" else ""
    logits, output = f"{tokens} v".strip(), (each, "", each) if args.return_teacher_entropy else (each, "")
    return {"student_logits": logits, "teacher_logits": logits, "weights": tokens, "output": output}


class FusedKLDivergence(Kernel[FusedKLDivergenceConfig, KLDivergenceOutput]):
    """Wraps `fused_kl_divergence` in an object that an `Executor` can call."""


OP = Op(
    arguments=FusedKLDivergenceArguments,
    family=family.FAMILY,
    validate=validate,
    lower=lower,
    cases=cases.cases(FusedKLDivergenceArguments),
    make_inputs=cases.make_inputs,
    axes={"student_logits": "t v", "teacher_logits": "t v", "weights": "t"},
    axes_of=_axes_of,
    output=("", "", ""),
    finish=finish,
)
FusedKLDivergence.op = OP
