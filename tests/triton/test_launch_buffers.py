"""Which buffer each parameter of a kernel gets where outputs take over inputs, under jax-triton 0.3 and 0.4."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_triton import _compat, launch

ARRAY = jax.ShapeDtypeStruct


@dataclasses.dataclass
class Buffer:
    """Memory on a device, by the name of what it holds."""

    name: str


def call_like_0_3(*arrays, kernel, out_shape, input_output_aliases=None, **options):
    """jax-triton 0.3: the parameters are the inputs, then all outputs, each with a pointer of its own."""
    return run_like_jaxlib(kernel, arrays, out_shape, input_output_aliases, len(arrays) + len(out_shape))


def call_like_0_4(*arrays, kernel, out_type=None, input_output_aliases=None, **options):
    """jax-triton 0.4: the parameters as they are declared, of which those without an array are outputs."""
    names = kernel.arg_names
    operands = dict(zip(names, arrays, strict=False)) | {k: v for k, v in options.items() if k in names}
    ordered = [operands[name] for name in names if name in operands]
    assert len(names) - len(operands) == len(out_type) - len(input_output_aliases)
    return run_like_jaxlib(kernel, ordered, out_type, input_output_aliases, len(names))


def run_like_jaxlib(kernel, operands, results, aliases, parameters):
    """jaxlib's launch: parameters take operands and then results, in the order of the call that XLA makes."""
    outputs = [Buffer(f"fresh {x.shape}") for x in results]
    for operand, result in aliases.items():
        outputs[result] = operands[operand]
    kernel.seen = [*operands, *outputs][:parameters]
    return outputs


@pytest.mark.parametrize("library", [call_like_0_3, call_like_0_4])
@pytest.mark.parametrize("aliased", [1, 2])
def test_each_parameter_gets_its_own_buffer(library, aliased, monkeypatch):
    monkeypatch.setattr(_compat, "triton_call", lambda: library)
    named = "out_shape" if library is call_like_0_3 else "out_type"
    monkeypatch.setattr(_compat, "output_shape_keyword", lambda: named)
    inputs, fresh = [Buffer(name) for name in "abc"], [ARRAY((n,), jnp.float32) for n in (1, 2)]
    aliases = {2: 0, 1: 1} if aliased == 2 else {1: 0}
    kernel = types.SimpleNamespace(arg_names=["a", "b", "c", *(f"written_{n}" for n in range(aliased)), "x", "y"])
    outputs = _compat.call_kernel(kernel, inputs, [ARRAY((9,), jnp.int8)] * aliased + fresh, aliases)
    source = [inputs[x] for x in sorted(aliases, key=aliases.get)]
    assert outputs[:aliased] == tuple(source)
    assert [x.name for x in outputs[aliased:]] == ["fresh (1,)", "fresh (2,)"]
    # The kernel writes to the very buffers that are returned.
    assert all(x is y for x, y in zip(kernel.seen[3:], outputs, strict=True))
    assert all(x is y for n, (x, y) in enumerate(zip(kernel.seen, inputs, strict=False)) if n not in aliases)


def test_an_output_in_place_after_a_fresh_one_is_refused():
    kernel = types.SimpleNamespace(arg_names=["x", "fresh", "written", "per"])
    with pytest.raises(ValueError, match=r"outputs: got the memory of an input for outputs \[1\] of 2"):
        launch.launch(
            kernel,
            (np.zeros((1, 4)),),
            (ARRAY((1, 4), jnp.float32), 0),
            batch=1,
            grid=1,
            num_warps=1,
            num_stages=1,
            constants={},
        )


def test_fused_multiply_add_is_requested(monkeypatch):
    """Triton 3.9 warns that later versions do not fuse unless told, and each jax-triton is told in its own way."""

    def with_options(*arrays, kernel, out_type, backend_options=None, **constants):
        """jax-triton 0.4."""

    def with_argument(*arrays, kernel, out_shape, enable_fp_fusion=True, **constants):
        """jax-triton 0.3."""

    asked = []
    for library in (with_options, with_argument):
        _compat.fp_fusion_argument.cache_clear()
        monkeypatch.setattr(_compat, "triton_call", lambda library=library: library)
        asked.append(_compat.fp_fusion_argument())
    _compat.fp_fusion_argument.cache_clear()
    assert asked == [{"backend_options": {"enable_fp_fusion": True}}, {"enable_fp_fusion": True}]
