"""A pocket reaches the backward function of the implementation that made it, under all of JAX, and no other."""

import jax
import jax.numpy as jnp
import numpy as np
import pocketed
import pytest
import toy
from jax.sharding import Mesh, PartitionSpec
from toy import toy as call

from ejkernel.ops import Pullback, overlay_cache
from ejkernel_conformance import checks
from ejkernel_conformance.subjects import Subject

PAIRED = pytest.mark.parametrize("paired", [False, True], ids=["apart", "pair"])


@pytest.fixture(autouse=True)
def notes():
    toy.SEEN.clear()
    pocketed.POCKETS.clear()


def loss(x, chain):
    return call(x, power=3, chain=chain).sum()


def given() -> list[bool]:
    """Whether each backward trace had a pocket."""
    return [pocket is not None for _, pocket in pocketed.POCKETS]


def rows(count: int = 4) -> jax.Array:
    return jnp.arange(count * 8.0).reshape(count, 8) / 8


@PAIRED
def test_the_backward_function_of_the_same_implementation_gets_the_pocket(use, chain, paired):
    use(toy.plugin(pocketed.implementation(paired=paired)))

    np.testing.assert_allclose(jax.grad(loss)(rows(), chain), 3 * rows() ** 2, rtol=1e-6)
    assert given() == [True]


@PAIRED
@pytest.mark.parametrize("policy", ["nothing_saveable", "everything_saveable", "dots_saveable"])
def test_checkpointing(use, chain, paired, policy):
    use(toy.plugin(pocketed.implementation(paired=paired)))
    kept = jax.checkpoint(lambda x: loss(jnp.sin(x), chain), policy=getattr(jax.checkpoint_policies, policy))

    want = 3 * jnp.sin(rows()) ** 2 * jnp.cos(rows())
    np.testing.assert_allclose(jax.jit(jax.grad(kept))(rows()), want, rtol=1e-5, atol=1e-6)
    assert given()
    assert all(given())


@PAIRED
def test_vmap_over_and_under_the_gradient(use, chain, paired):
    use(toy.plugin(pocketed.implementation(paired=paired)))
    many = jnp.stack([rows(), rows() + 1, rows() - 2])

    np.testing.assert_allclose(jax.vmap(lambda x: jax.grad(loss)(x, chain))(many), 3 * many**2, rtol=1e-6)
    under = jax.grad(lambda xs: jax.vmap(lambda x: loss(x, chain))(xs).sum())
    np.testing.assert_allclose(under(many), 3 * many**2, rtol=1e-6)
    assert all(given())


@PAIRED
def test_shard_map_over_eight_devices(use, chain, paired):
    use(toy.plugin(pocketed.implementation(paired=paired)))
    mesh, spec = Mesh(np.array(jax.devices()[:8]), ("d",)), PartitionSpec("d")
    x = rows(16)

    def split(x):
        return call(x, power=3, chain=chain, mesh=mesh, in_specs=(spec,), out_specs=spec).sum()

    np.testing.assert_allclose(jax.grad(split)(x), 3 * x**2, rtol=1e-6)
    inside = jax.shard_map(lambda x: jax.grad(loss)(x, chain), mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_allclose(jax.jit(inside)(x), 3 * x**2, rtol=1e-6)
    assert given()
    assert all(given())


@PAIRED
def test_scan_over_layers(use, chain, paired):
    use(toy.plugin(pocketed.implementation(paired=paired)))

    def layers(x):
        return jax.lax.scan(lambda x, _: (call(x, power=2, chain=chain), None), x, None, length=3)[0].sum()

    x = 1 + rows() / 8
    np.testing.assert_allclose(jax.jit(jax.grad(layers))(x), 8 * x**7, rtol=1e-5)
    assert given()
    assert all(given())


@PAIRED
def test_an_exported_gradient(use, chain, paired):
    use(toy.plugin(pocketed.implementation(paired=paired)))
    exported = jax.export.export(jax.jit(lambda x: loss(x, chain)))(rows())
    blob = exported.serialize(vjp_order=1)
    again = jax.export.deserialize(blob)

    np.testing.assert_allclose(jax.grad(again.call)(rows()), 3 * rows() ** 2, rtol=1e-6)
    step = jax.export.export(jax.jit(lambda x: jax.grad(loss)(x, chain)))(rows())
    np.testing.assert_allclose(jax.export.deserialize(step.serialize()).call(rows()), 3 * rows() ** 2, rtol=1e-6)
    assert given()
    assert all(given())


@PAIRED
def test_donated_buffers(use, chain, paired):
    use(toy.plugin(pocketed.implementation(paired=paired)))
    step = jax.jit(lambda x: x - 0.1 * jax.grad(loss)(x, chain), donate_argnums=0)
    x, want = rows(), rows()
    for _ in range(3):
        x, want = step(x), want - 0.3 * want**2
    np.testing.assert_allclose(x, want, rtol=1e-5, atol=1e-6)
    assert all(given())


@pytest.mark.parametrize("refuses", ["forward", "backward"])
def test_another_implementation_never_sees_it(use, chain, refuses):
    """The forward passes through one implementation and the backward through another, either way around."""
    own = {"gradients": frozenset()} if refuses == "backward" else {}
    first = pocketed.implementation(priority=1, **own)
    other = toy.implementation("other", backward="pocketed:other_backward")
    use(toy.plugin(first, other))

    np.testing.assert_allclose(jax.grad(loss)(rows(), chain), 3 * rows() ** 2, rtol=1e-6)
    assert given() == [refuses == "forward"]


def test_a_backward_pass_from_elsewhere_works_from_the_residuals(use, chain):
    plain = toy.implementation("plain", priority=1, backward=None, gradients=frozenset())
    use(toy.plugin(plain, pocketed.implementation()))

    np.testing.assert_allclose(jax.grad(loss)(rows(), chain), 3 * rows() ** 2, rtol=1e-6)
    assert pocketed.POCKETS == [("pocket", None)]


@pytest.mark.parametrize("paired", [False, True], ids=["apart", "pair"])
def test_conformance_checks_it(use, paired):
    use(toy.plugin(pocketed.implementation(paired=paired)))
    subject = Subject(op=toy.OP, implementation=pocketed.implementation(paired=paired), case=toy.OP.cases[0])

    checks.check_shapes(subject)
    checks.check_gradients(subject)
    checks.check_gradients_after_another(subject)
    checks.check_vmap(subject)
    checks.check_candidate(subject, "both" if paired else "forward", pocketed.candidates(None, None, "both")[0])


def test_conformance_finds_a_backward_that_cannot_do_without_it(use):
    broken = pocketed.implementation(backward="pocketed:pair_backward")
    use(toy.plugin(broken))

    with pytest.raises(AttributeError, match="chunks"):
        checks.check_gradients_after_another(Subject(op=toy.OP, implementation=broken, case=toy.OP.cases[0]))


def test_a_pullback_has_no_pocket_unless_it_is_given():
    assert Pullback(record=0, residuals=(), output=0, cotangent=0, wanted=frozenset()).pocket is None


def test_the_backward_pass_has_the_pairs_configuration_outside_of_the_block_that_gave_it(use, chain):
    use(toy.plugin(pocketed.implementation(paired=True)))
    with overlay_cache({"toy": toy.ToyConfig(fwd_params=toy.FwdParams(q_blocksize=2))}):
        _, pull = jax.vjp(lambda x: call(x, power=3, chain=chain), rows())

    np.testing.assert_allclose(pull(jnp.ones((4, 8)))[0], 3 * rows() ** 2, rtol=1e-6)
    assert {part.q_blocksize for _, _, part in toy.SEEN} == {2}
    assert toy.SEEN[-2][2] is toy.SEEN[-1][2]
