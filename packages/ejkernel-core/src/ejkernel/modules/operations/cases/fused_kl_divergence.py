"""Inputs for `fused_kl_divergence`: the named cases every backend is tested on, and inputs of any given shapes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.tables import Row, fill_arguments, make_cases_of_rows, normal_like
from ejkernel.ops.model import Case


class DivergenceSizes(NamedTuple):
    """Axes of the tokens, entries of the vocabulary, and the dtypes of the student and the teacher."""

    tokens: tuple[int, ...]
    vocab_size: int
    student_dtype: Any = jnp.float32
    teacher_dtype: Any = jnp.float32


def _make_inputs_of_sizes(key: jax.Array, sizes: DivergenceSizes) -> dict[str, Any]:
    student, teacher = 2 * jax.random.normal(key, (2, *sizes.tokens, sizes.vocab_size))
    return {
        "student_logits": student.astype(sizes.student_dtype),
        "teacher_logits": teacher.astype(sizes.teacher_dtype),
    }


def _mask_arguments(key: jax.Array) -> dict[str, Any]:
    return {"attention_mask": jnp.arange(12) < jnp.array([[12], [7], [0]]), "reduction": "none", "direction": "jsd"}


_CASE_TABLE: tuple[Row[DivergenceSizes], ...] = (
    ("forward", DivergenceSizes((3, 12), 50), lambda key: {"temperature": 2.0}, (), ()),
    (
        "reverse, weights",
        DivergenceSizes((40,), 33),
        lambda key: {"direction": "reverse", "weights": jax.random.uniform(key, (40,)), "reduction": "sum"},
        (),
        (),
    ),
    ("jsd, padding", DivergenceSizes((3, 12), 65), _mask_arguments, (), ()),
    (
        "jsd, beta",
        DivergenceSizes((24,), 130),
        lambda key: {"direction": "jsd", "beta": 0.1, "temperature": 0.5},
        (),
        (),
    ),
    (
        "bfloat16, teacher float32",
        DivergenceSizes((2, 32), 200, jnp.bfloat16),
        lambda key: {"return_teacher_entropy": True},
        (),
        (),
    ),
    (
        "each, bfloat16",
        DivergenceSizes((32,), 256, jnp.bfloat16, jnp.bfloat16),
        lambda key: {"reduction": "none", "direction": "reverse"},
        (),
        (),
    ),
    ("Llama 3", DivergenceSizes((8192,), 128256, jnp.bfloat16, jnp.bfloat16), lambda key: {}, (), ("bench",)),
    ("small model", DivergenceSizes((2, 128), 16000), lambda key: {}, (), ("bench_cpu",)),
)


def cases(record_type: type) -> tuple[Case, ...]:
    """Returns the named cases as argument records of the given type."""
    return make_cases_of_rows(record_type, _make_inputs_of_sizes, _CASE_TABLE)


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Returns concrete arguments of the given shapes, valid as a call."""

    def make(name: str, x: Any, key: jax.Array) -> jax.Array:
        if name == "attention_mask":
            return jnp.ones(x.shape, x.dtype)
        return jnp.abs(normal_like(key, x)) if name == "weights" else normal_like(key, x)

    return fill_arguments(args, key, make)
