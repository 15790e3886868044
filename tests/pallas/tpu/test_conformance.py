"""The conformance suite on the TPU kernels, interpreted on a CPU; whether they are is read when plugins load."""

import pytest
from suite.servers import run_pytest

from ejkernel.ops.plugins import registry
from ejkernel_pallas.tpu.interpret import INTERPRET_VARIABLE

# The numbers of every field are in `tiled_attention/test_values.py`; here is what only the suite asks, on few cases.
# All of it runs with the same variable: `pytest --pyargs ejkernel_conformance --ejk-impl mosaic_tpu`.
TILED = ("flash_attention", "blocksparse_attention", "scaled_dot_product_attention")
PAGED = ("ragged_page_attention_v3", "page_attention")
PARTS = {
    "claims": (TILED, "test_gives_gradient"),
    "calls": (TILED, "(everything and not eager and not determinism) or (test_candidates and forward)"),
    "packed": (
        TILED,
        "flash_attention and packed and not other and (test_padding or test_request or test_shard or test_vmap)",
    ),
    "patterns": (TILED, "blocksparse_attention and patterns and (test_gradients or test_shard)"),
    # The suite proves every claim; this is the cheapest.
    "invariance": (("flash_attention",), "test_batch_invariance and chunking"),
    "paged": (PAGED, "(int8 and test_value) or (lengths and test_vmap)"),
}


@pytest.mark.whole
@pytest.mark.parametrize("part", PARTS)
def test_conformance(part):
    ops, tests = PARTS[part]
    run_suite("--ejk-impl=mosaic_tpu", "-k", tests, *(f"--ejk-op={op}" for op in ops))


@pytest.mark.design
def test_covering_design():
    """Each operation, and each argument that a kernel handles, in some value."""
    every = {i.name for listed in registry().implementations.values() for i in listed if "tpu" in i.requires.devices}
    names = sorted(every - {"xla"})
    run_suite("--ejk-cover=first", "--ejk-transform=test_value", *(f"--ejk-impl={name}" for name in names))


def run_suite(*options):
    arguments = ["--pyargs", "ejkernel_conformance", "-q", "-p", "no:cacheprovider", *options]
    ran = run_pytest(arguments, **{INTERPRET_VARIABLE: "1", "JAX_PLATFORMS": "cpu"})
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert " passed" in ran.stdout
