"""Old import paths, and the version that libraries written for the earlier one look at."""

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.compat.paths import OLD_PATHS
from ejkernel.modules import gated_delta_rule, ragged_gated_delta_rule
from ejkernel.ops import plugins


@pytest.mark.parametrize("old", OLD_PATHS)
def test_an_old_path_is_the_module_that_has_its_names(old):
    assert importlib.import_module(old) is importlib.import_module(OLD_PATHS[old])
    assert importlib.import_module(OLD_PATHS[old]).__spec__.name == OLD_PATHS[old]


def test_an_old_path_leaves_the_function_of_its_name_in_the_package():
    importlib.import_module("ejkernel.ops.registry")
    assert ejkernel.ops.registry is plugins.registry


def test_every_old_path_can_be_imported_first():
    script = "; ".join(["import sys, importlib", *(f"importlib.import_module({old!r})" for old in OLD_PATHS)])
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_modules_of_an_old_package_are_loaded_once():
    """Python's own finder would load them a second time, from their files, under the old path."""
    packages = [importlib.import_module(new) for new in set(OLD_PATHS.values())]
    below = [(p, m.name) for p in packages if hasattr(p, "__path__") for m in pkgutil.iter_modules(p.__path__)]
    assert {name for _, name in below} >= {"attention", "cumsum", "sharding", "sparse"}
    for package, name in below:
        old = next(old for old, new in OLD_PATHS.items() if new == package.__name__)
        assert importlib.import_module(f"{old}.{name}") is importlib.import_module(f"{package.__name__}.{name}")


def test_only_what_is_imported_from_inside_is_outside_of_compat():
    """Modules at the root of the package that nothing in it imports exist for callers of another library."""
    root = Path(ejkernel.__file__).parent
    modules = {path.stem for path in root.iterdir() if path.suffix == ".py" and not path.stem.startswith("_")}
    imports = "".join(p.read_text(encoding="utf-8") for p in root.rglob("*.py") if "compat" not in p.parts)
    assert {name for name in modules if f"ejkernel.{name} import" not in imports} == set()


def test_a_path_that_is_not_in_the_table_is_not_found():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("ejkernel.kernels._cute")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("ejkernel.callib._triton_call")


def test_the_reported_version_is_that_of_the_library_unless_a_variable_says_otherwise(monkeypatch):
    from ejkernel._version import __version__

    monkeypatch.delenv("EJKERNEL_UPSTREAM_VERSION", raising=False)
    assert ejkernel.__version__ == __version__
    monkeypatch.setenv("EJKERNEL_UPSTREAM_VERSION", "0.0.78")
    assert ejkernel.__version__ == "0.0.78"
    from ejkernel import __version__ as imported

    assert imported == "0.0.78"
    assert ejkernel.explain("flash_attention", *[jnp.ones((1, 4, 1, 8))] * 3).forward.failed_plugins == ()


QUERY, KEY, VALUE = jax.random.normal(jax.random.key(0), (3, 6, 2, 8))
BETA = jax.nn.sigmoid(jax.random.normal(jax.random.key(1), (6, 2)))
DECAY = -jax.nn.softplus(jax.random.normal(jax.random.key(2), (6, 2)))
SLOTS = jax.random.normal(jax.random.key(3), (7, 2, 8, 8))


def test_private_kernels_of_the_packed_delta_rule_call_the_operation():
    from ejkernel.kernels._pallas.tpu.ragged_gated_delta_rule._interface import _decode_path
    from ejkernel.kernels._xla.ragged_gated_delta_rule._xla_impl_fwd import _ragged_gdr_chunked_prefill

    arrays = QUERY, KEY, VALUE, BETA, DECAY, SLOTS
    starts, indices = jnp.array([0, 4, 6]), jnp.array([5, 1])
    output, slots = ragged_gated_delta_rule(*arrays, starts, indices, chunk_size=4)
    got_slots, got = _ragged_gdr_chunked_prefill(*arrays, starts, indices, 4, True)
    np.testing.assert_allclose(got, output, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got_slots, slots, rtol=1e-6, atol=1e-6)

    # Two requests; the other tokens are padding, for which a server repeats slot 0.
    padded = jnp.array([0, 3, 0, 0, 0, 0])
    got, got_slots = _decode_path(*arrays, padded, True)
    first = [x[:2] for x in arrays[:5]]
    output, slots = ragged_gated_delta_rule(*first, SLOTS, jnp.arange(3), padded[:2])
    np.testing.assert_allclose(got[:2], output, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got_slots, slots, rtol=1e-6, atol=1e-6)


def test_the_private_step_of_the_delta_rule_has_heads_first():
    from ejkernel.kernels._xla.gated_delta_rule._xla_impl_fwd import _single_step_gdr_fwd

    tokens = [x[:, None] for x in (QUERY, KEY, VALUE, BETA, DECAY)]
    output, state = gated_delta_rule(*tokens, initial_state=SLOTS[:6], return_state=True)
    got, got_state = _single_step_gdr_fwd(*(jnp.swapaxes(x, 1, 2) for x in tokens), SLOTS[:6])
    np.testing.assert_allclose(jnp.swapaxes(got, 1, 2), output, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got_state, state, rtol=1e-6, atol=1e-6)


def test_signatures_of_arguments_tell_shapes_dtypes_and_structure_apart():
    from ejkernel.callib._ejit import _get_args_signature as signature

    x = jnp.ones((2, 3))
    assert signature((x,), {"a": 1}) == signature((x + 1,), {"a": 2})
    for args, kwargs in (((x.T,), {"a": 1}), ((x.astype(jnp.int32),), {"a": 1}), ((x,), {"b": 1}), ((x,), {"a": "1"})):
        assert signature(args, kwargs) != signature((x,), {"a": 1})
