"""The covering design of the conformance suite on all Triton kernels, interpreted on a CPU.

Each operation, each kernel and each argument that a kernel handles appears. The files of the families have what is of
one family alone.
"""

import pytest
from triton_chips import assert_covers

TRANSFORMS = ("test_value", "test_gradients", "test_gives_gradient", "test_padding", "test_padding_gradients")


@pytest.mark.design
def test_covering_design():
    """One process, which imports and collects once."""
    assert_covers(*TRANSFORMS)
