"""The conformance suite as part of the project's own tests: everything that is installed here, on every `ci` case.

The tests are the suite's, imported; its pytest plugin, which is installed with it, fills in what they are run on.
"""

from ejkernel_conformance.test_batch_invariance import test_batch_invariance
from ejkernel_conformance.test_candidates import test_candidates
from ejkernel_conformance.test_capabilities import (
    test_gives_gradient,
    test_handles,
    test_refusals,
    test_serves_some_case,
    test_sharding_fields,
)
from ejkernel_conformance.test_determinism import test_determinism, test_gradient_determinism
from ejkernel_conformance.test_forward_mode import test_forward_mode
from ejkernel_conformance.test_gradients import test_gradients
from ejkernel_conformance.test_padding import test_padding, test_padding_gradients
from ejkernel_conformance.test_requests import test_request_gradients, test_requests
from ejkernel_conformance.test_shards import test_shard
from ejkernel_conformance.test_value import test_eager_equals_jit, test_residuals, test_shapes, test_value
from ejkernel_conformance.test_vmap import test_vmap

__all__ = [
    "test_batch_invariance",
    "test_candidates",
    "test_determinism",
    "test_eager_equals_jit",
    "test_forward_mode",
    "test_gives_gradient",
    "test_gradient_determinism",
    "test_gradients",
    "test_handles",
    "test_padding",
    "test_padding_gradients",
    "test_refusals",
    "test_request_gradients",
    "test_requests",
    "test_residuals",
    "test_serves_some_case",
    "test_shapes",
    "test_shard",
    "test_sharding_fields",
    "test_value",
    "test_vmap",
]
