"""XLA passes the conformance cases of the indexer's kernels, whose queries and keys are float8_e4m3fn."""

import pytest

from ejkernel.ops.plugins import registry
from ejkernel_conformance import checks, requests
from ejkernel_conformance.subjects import Subject
from ejkernel_cuda.lightning_indexer.cases import cases

NAME = "lightning_indexer"
CHECKS = (checks.check_value, checks.check_gradients, requests.check_requests, requests.check_request_gradients)


@pytest.mark.parametrize("check", CHECKS, ids=lambda x: x.__name__)
@pytest.mark.parametrize("case", cases()[NAME], ids=lambda x: x.name)
def test_xla_passes_cases_in_float8(case, check):
    implementation = next(x for x in registry().implementations[NAME] if x.name == "xla")
    check(Subject(op=registry().op(NAME), implementation=implementation, case=case))
