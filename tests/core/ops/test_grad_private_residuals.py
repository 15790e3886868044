"""Private residuals reach the backward function of the paired implementation that made them, under all of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import private_residuals
import pytest
import toy
from jax.sharding import Mesh, PartitionSpec
from toy import toy as call

from ejkernel.ops import Pullback, overlay_cache
from ejkernel_conformance import checks
from ejkernel_conformance.subjects import Subject


@pytest.fixture(autouse=True)
def notes():
    toy.SEEN.clear()
    private_residuals.PRIVATE.clear()


def loss(x, chain):
    return call(x, power=3, chain=chain).sum()


def given() -> list[bool]:
    """Whether each backward trace had private residuals."""
    return [private is not None for private in private_residuals.PRIVATE]


def rows(count: int = 4) -> jax.Array:
    return jnp.arange(count * 8.0).reshape(count, 8) / 8


def test_backward_gets_the_private_residuals_of_its_forward(use, chain):
    use(toy.plugin(private_residuals.implementation()))

    np.testing.assert_allclose(jax.grad(loss)(rows(), chain), 3 * rows() ** 2, rtol=1e-6)
    assert given() == [True]


@pytest.mark.parametrize("policy", ["nothing_saveable", "everything_saveable", "dots_saveable"])
def test_private_residuals_under_jax_checkpoint(use, chain, policy):
    use(toy.plugin(private_residuals.implementation()))
    kept = jax.checkpoint(lambda x: loss(jnp.sin(x), chain), policy=getattr(jax.checkpoint_policies, policy))

    want = 3 * jnp.sin(rows()) ** 2 * jnp.cos(rows())
    np.testing.assert_allclose(jax.jit(jax.grad(kept))(rows()), want, rtol=1e-5, atol=1e-6)
    assert given()
    assert all(given())


def test_vmap_over_and_under_the_gradient(use, chain):
    use(toy.plugin(private_residuals.implementation()))
    many = jnp.stack([rows(), rows() + 1, rows() - 2])

    np.testing.assert_allclose(jax.vmap(lambda x: jax.grad(loss)(x, chain))(many), 3 * many**2, rtol=1e-6)
    under = jax.grad(lambda xs: jax.vmap(lambda x: loss(x, chain))(xs).sum())
    np.testing.assert_allclose(under(many), 3 * many**2, rtol=1e-6)
    assert all(given())


def test_shard_map_over_eight_devices(use, chain):
    use(toy.plugin(private_residuals.implementation()))
    mesh, spec = Mesh(np.array(jax.devices()[:8]), ("d",)), PartitionSpec("d")
    x = rows(16)

    def split(x):
        return call(x, power=3, chain=chain, mesh=mesh, in_specs=(spec,), out_specs=spec).sum()

    np.testing.assert_allclose(jax.grad(split)(x), 3 * x**2, rtol=1e-6)
    inside = jax.shard_map(lambda x: jax.grad(loss)(x, chain), mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_allclose(jax.jit(inside)(x), 3 * x**2, rtol=1e-6)
    assert given()
    assert all(given())


def test_scan_over_layers(use, chain):
    use(toy.plugin(private_residuals.implementation()))

    def layers(x):
        return jax.lax.scan(lambda x, _: (call(x, power=2, chain=chain), None), x, None, length=3)[0].sum()

    x = 1 + rows() / 8
    np.testing.assert_allclose(jax.jit(jax.grad(layers))(x), 8 * x**7, rtol=1e-5)
    assert given()
    assert all(given())


def test_private_residuals_in_an_exported_gradient(use, chain):
    use(toy.plugin(private_residuals.implementation()))
    exported = jax.export.export(jax.jit(lambda x: loss(x, chain)))(rows())
    blob = exported.serialize(vjp_order=1)
    again = jax.export.deserialize(blob)

    np.testing.assert_allclose(jax.grad(again.call)(rows()), 3 * rows() ** 2, rtol=1e-6)
    step = jax.export.export(jax.jit(lambda x: jax.grad(loss)(x, chain)))(rows())
    np.testing.assert_allclose(jax.export.deserialize(step.serialize()).call(rows()), 3 * rows() ** 2, rtol=1e-6)
    assert given()
    assert all(given())


def test_private_residuals_with_donated_buffers(use, chain):
    use(toy.plugin(private_residuals.implementation()))
    step = jax.jit(lambda x: x - 0.1 * jax.grad(loss)(x, chain), donate_argnums=0)
    x, want = rows(), rows()
    for _ in range(3):
        x, want = step(x), want - 0.3 * want**2
    np.testing.assert_allclose(x, want, rtol=1e-5, atol=1e-6)
    assert all(given())


def test_private_residuals_of_an_unpaired_implementation_raise(use, chain):
    """Nothing would read them where the backward pass is another implementation's."""
    use(toy.plugin(private_residuals.implementation(paired=False)))

    with pytest.raises(ValueError, match="private: its forward function returned private residuals"):
        call(rows(), chain=chain)
    with pytest.raises(ValueError, match="private: its forward function returned private residuals"):
        jax.grad(loss)(rows(), chain)


def test_conformance_checks_accept_private_residuals(use):
    use(toy.plugin(private_residuals.implementation()))
    subject = Subject(op=toy.OP, implementation=private_residuals.implementation(), case=toy.OP.cases[0])

    checks.check_shapes(subject)
    checks.check_gradients(subject)
    checks.check_vmap(subject)
    checks.check_candidate(subject, "both", private_residuals.candidates(None, None, "both")[0])


def test_private_residuals_of_a_pullback_default_to_none():
    assert Pullback(record=0, residuals=(), output=0, cotangent=0, grad_fields=frozenset()).private_residuals is None


def test_backward_of_a_pair_keeps_the_overlay_config_of_its_forward(use, chain):
    use(toy.plugin(private_residuals.implementation()))
    with overlay_cache({"toy": toy.ToyConfig(fwd_params=toy.FwdParams(q_blocksize=2))}):
        _, pull = jax.vjp(lambda x: call(x, power=3, chain=chain), rows())

    np.testing.assert_allclose(pull(jnp.ones((4, 8)))[0], 3 * rows() ** 2, rtol=1e-6)
    assert {part.q_blocksize for _, _, part in toy.SEEN} == {2}
    assert toy.SEEN[-2][2] is toy.SEEN[-1][2]


def test_two_pairs_that_two_sets_of_differentiated_arguments_choose(use, chain):
    """JAX pairs the arrays of each trace of a forward pass with the tree of the last one."""

    def tile_rows(rows):
        return toy.space(lambda *_: toy.FwdParams(q_blocksize=rows), private_residuals.candidates)

    of_x = private_residuals.implementation("of_x", gradients=frozenset({"x"}), priority=9, config=tile_rows(1))
    of_both = private_residuals.implementation("of_both", config=tile_rows(2), forward="private_residuals:forward_late")
    use(toy.plugin(of_x, of_both))
    loss = jax.jit(lambda x, bias: call(x, bias, power=3, chain=chain).sum())
    x, bias = rows(), jnp.ones((4, 8))

    for function in (loss, jax.checkpoint(loss)):
        for argnums in ((0, 1), 0, (0, 1), 0):
            gradients = jax.grad(function, argnums)(x, bias)
            np.testing.assert_allclose(jax.tree.leaves(gradients)[0], 3 * x**2, rtol=1e-6)
    assert all(given())
