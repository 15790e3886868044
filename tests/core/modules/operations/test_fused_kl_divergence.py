"""`fused_kl_divergence`: beside a float64 loop and JAX's gradients, over a vocabulary that is split, and its errors."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules import fused_kl_divergence

T, V = 6, 16
OPTIONS = [
    {"direction": "forward"},
    {"direction": "reverse", "temperature": 2.0},
    {"direction": "jsd", "beta": 0.3, "temperature": 0.5},
]


def logits():
    return 2 * jax.random.normal(jax.random.key(0), (2, T, V))


def loop(student, teacher, *, direction, temperature=1.0, beta=0.5):
    """Every token's divergence, one entry after another, in float64."""

    def softmax(row):
        powers = [math.exp(x / temperature - max(row) / temperature) for x in row]
        return [x / sum(powers) for x in powers]

    def kl(a, b):
        return sum(x * (math.log(x) - math.log(y)) for x, y in zip(a, b, strict=True))

    losses = []
    for row, other in zip(np.asarray(student, float), np.asarray(teacher, float), strict=True):
        p, q = softmax(row), softmax(other)
        m = [beta * y + (1 - beta) * x for x, y in zip(p, q, strict=True)]
        terms = {"forward": kl(q, p), "reverse": kl(p, q), "jsd": beta * kl(q, m) + (1 - beta) * kl(p, m)}
        losses.append(temperature**2 * terms[direction])
    return np.array(losses)


@pytest.mark.parametrize("options", OPTIONS)
def test_the_divergences_are_those_of_a_loop(options):
    student, teacher = logits()
    out = fused_kl_divergence(student, teacher, reduction="none", **options)
    np.testing.assert_allclose(out.loss, loop(student, teacher, **options), rtol=1e-5)


def test_forward_divergence_and_entropy_add_up_to_the_cross_entropy():
    student, teacher = logits()
    out = fused_kl_divergence(student, teacher, return_teacher_entropy=True)
    cross = -(jax.nn.softmax(teacher) * jax.nn.log_softmax(student)).sum(-1).mean()
    np.testing.assert_allclose(out.loss + out.teacher_entropy, cross, rtol=1e-5)
    assert fused_kl_divergence(student, teacher).teacher_entropy is None


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_vocabulary_over_devices_is_the_whole_one(options, check_vma):
    student, teacher = logits()
    mesh = Mesh(np.array(jax.devices()[:4]), ("tp",))

    def parallel(student, teacher):
        def run(student, teacher):
            return fused_kl_divergence(student, teacher, vocab_parallel_axis="tp", **options).loss

        split = PartitionSpec(None, "tp")
        return jax.shard_map(run, mesh=mesh, in_specs=(split, split), out_specs=PartitionSpec(), check_vma=check_vma)(
            student, teacher
        )

    def whole(student, teacher):
        return fused_kl_divergence(student, teacher, **options).loss

    got, want = (jax.jit(jax.value_and_grad(f))(student, teacher) for f in (parallel, whole))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-4, atol=1e-7)


def test_entries_that_are_impossible_count_nothing():
    student, teacher = logits()
    student, teacher = student.at[:, 3].set(-jnp.inf), teacher.at[:, 3].set(-jnp.inf)
    kept = np.arange(V) != 3
    for options in OPTIONS:
        run = lambda x, y, options=options: fused_kl_divergence(x, y, **options).loss  # noqa: E731
        value, gradient = jax.value_and_grad(run)(student, teacher)
        np.testing.assert_allclose(value, run(student[:, kept], teacher[:, kept]), rtol=1e-5)
        assert np.isfinite(np.asarray(gradient)).all(), options


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"teacher_logits": jnp.zeros((T, V + 1))}, "teacher_logits: got shape"),
        ({"student_logits": jnp.zeros((T, V), int)}, "student_logits: got dtype"),
        ({"temperature": 0.0}, "temperature: got"),
        ({"beta": 1.0}, "beta: got"),
        ({"direction": "both"}, "direction: got str 'both'"),
        ({"weights": jnp.ones(T - 1)}, "weights: got shape"),
    ],
)
def test_wrong_calls_say_what_is_wrong(change, message):
    student, teacher = logits()
    with pytest.raises(ValueError, match=message):
        fused_kl_divergence(**{"student_logits": student, "teacher_logits": teacher, **change})
