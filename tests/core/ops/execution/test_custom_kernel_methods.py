"""Methods of a caller's own kernel that are written for a kind of device, for `shard_map`, or for the gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from ejkernel.ops import AutotunePolicy, ConfigSelectorChain, Executor, Kernel
from ejkernel.ops.device import DeviceInfo, target_device

X = jnp.arange(8.0)
GPU = DeviceInfo(platform="gpu", vendor="nvidia", kind="gpu", compute_capability=9.0)
TPU = DeviceInfo(platform="tpu", vendor="google", kind="tpu")
EXECUTOR = Executor(ConfigSelectorChain(policy=AutotunePolicy()))


class Scaled(Kernel):
    """Multiplies by its configuration and by a number that says which method ran."""

    def __init__(self):
        super().__init__("scaled")

    def run(self, x, *, cfg):
        return x * cfg

    def run_cpu(self, x, *, cfg):
        return x * cfg * 10

    def run_gpu(self, x, *, cfg):
        return x * cfg * 100

    def heuristic_cfg(self, inv):
        return 1.0

    def heuristic_cfg_cpu(self, inv):
        return 2.0

    def heuristic_cfg_tpu(self, inv):
        return 3.0


class OnlyOnGpu(Kernel):
    def run_gpu(self, x, *, cfg):
        return x

    def heuristic_cfg(self, inv):
        return None


@pytest.mark.parametrize(("device", "factor"), [(None, 20.0), (GPU, 100.0), (TPU, 3.0)], ids=["cpu", "gpu", "tpu"])
def test_a_custom_kernel_runs_its_method_for_the_device(device, factor):
    if device is None:
        got = EXECUTOR(Scaled(), X)
    else:
        with target_device(device):
            got = EXECUTOR(Scaled(), X)
    np.testing.assert_array_equal(got, factor * X)


def test_a_custom_kernel_without_a_method_for_the_device_raises():
    with pytest.raises(NotImplementedError, match="OnlyOnGpu has no run method for cpu"):
        EXECUTOR(OnlyOnGpu(), X)


class Cubed(Kernel):
    """x**3 with a gradient of its own, twice the true one, to see that it is used."""

    def run(self, x, scale=1.0, *, cfg, shift=0.0):
        return scale * x**3 + shift

    def fwd_with_residuals(self, x, scale=1.0, *, cfg, shift=0.0):
        return scale * x**3 + shift, x

    def vjp(self, residuals, dy, x, scale=1.0, *, cfg, shift=0.0):
        return (6 * scale * residuals**2 * dy, None)

    def heuristic_cfg(self, inv):
        return None


class CubedWithOutput(Cubed):
    def vjp_gpu(self, residuals, y, dy, x, scale=1.0, *, cfg, shift=0.0):
        return (y * dy, None)


def test_a_custom_kernels_gradient_method_is_used():
    got = jax.grad(lambda x: EXECUTOR(Cubed(), x, 2.0).sum())(X)
    np.testing.assert_allclose(got, 12 * X**2)
    with target_device(GPU):
        got = jax.jit(jax.grad(lambda x: EXECUTOR(CubedWithOutput(), x, 2.0).sum()))(X)
    np.testing.assert_allclose(got, 2 * X**3)


def test_which_arguments_have_a_custom_gradient_does_not_depend_on_earlier_gradients():
    def loss(x, scale):
        return EXECUTOR(Cubed(), x, scale).sum()

    for transformed in (jax.checkpoint(loss), jax.jit(jax.checkpoint(loss))):
        with pytest.raises(NotImplementedError, match="no gradient of positional argument 1"):
            jax.grad(transformed, (0, 1))(X, 2.0)
        np.testing.assert_allclose(jax.grad(transformed)(X, 2.0), 12 * X**2)


def test_an_argument_without_a_custom_gradient_raises_when_differentiated():
    with pytest.raises(NotImplementedError, match="no gradient of positional argument 1"):
        jax.grad(lambda s: EXECUTOR(Cubed(), X, s).sum())(jnp.float32(2))
    with pytest.raises(NotImplementedError, match="gradients of positional arguments alone"):
        jax.grad(lambda s: EXECUTOR(Cubed(), X, 2.0, shift=s).sum())(jnp.float32(2))


class OneGradientTooFew(Cubed):
    def vjp(self, residuals, dy, x, scale=1.0, *, cfg, shift=0.0):
        return (dy,)


def test_custom_vjp_must_return_one_gradient_per_argument():
    with pytest.raises(TypeError, match="vjp returned 1 gradients, wants one for each of 2"):
        jax.grad(lambda x: EXECUTOR(OneGradientTooFew(), x, jnp.float32(2)).sum())(X)


class Mapped(Scaled):
    def run_shard_map(self, x, *, cfg):
        return x * cfg + x.shape[0]


class Wrapped(Scaled):
    def create_shard_map_wrapper(self, x, *, mesh, in_specs, out_specs, check_vma, cfg):
        mapped = jax.shard_map(lambda x: x + 1, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
        return mapped, (x,), lambda output, cfg: output * cfg


def test_a_custom_kernel_under_a_mesh_uses_its_shard_map_method():
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    options = {"mesh": mesh, "in_specs": (PartitionSpec("x"),), "out_specs": PartitionSpec("x")}
    np.testing.assert_array_equal(EXECUTOR(Mapped(), X, method="shard_map", **options), 2 * X + 8)
    np.testing.assert_array_equal(EXECUTOR(Mapped(), X, **options), 2 * X + 8)
    np.testing.assert_array_equal(EXECUTOR(Wrapped(), X, **options), (X + 1) * 2)
    with pytest.raises(ValueError, match="in_specs: got None, wants a value"):
        EXECUTOR(Mapped(), X, mesh=mesh)
    with pytest.raises(ValueError, match="method: got 'pmap'"):
        EXECUTOR(Mapped(), X, method="pmap")
